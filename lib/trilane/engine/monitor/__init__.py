"""What a running training reports: log lines, steps, TensorBoard, timers, phases, heartbeats, call traces."""
