"""Measured rates of this machine or cluster: matmul, memory, collectives."""
