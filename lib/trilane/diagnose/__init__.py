"""What went wrong with a run, from what its ranks left behind: stacks, Flight Recorder dumps, heartbeats, timings."""
