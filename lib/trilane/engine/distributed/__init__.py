"""Distributed set-up: rank and world, small collectives, and the patches that let megatron-core run on a CPU."""
