"""What this machine or cluster can do, measured: matmul, memory, collectives."""
