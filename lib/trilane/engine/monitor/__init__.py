"""What a running training reports: log lines, steps, TensorBoard, phases and their times, heartbeats, call traces."""
