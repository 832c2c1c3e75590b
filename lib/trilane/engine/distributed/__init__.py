"""Processes: this rank and its world, small collectives, and what lets megatron-core run on a CPU."""
