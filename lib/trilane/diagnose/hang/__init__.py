"""Hangs: stacks, Flight Recorder dumps and call traces of all ranks, merged into who waits for whom."""
