"""Processes: the world and its groups, CPU in place of CUDA, small gathers."""
