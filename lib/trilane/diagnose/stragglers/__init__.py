"""Slow ranks, nodes and links, found in the phase times of all ranks, and the nodes to swap."""
