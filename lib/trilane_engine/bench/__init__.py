"""Measured rates of this machine or cluster, and the test of a node before a training."""
