"""A trace: the plan's real engine, rank by rank in one machine, on tensors without memory; what it
holds and sends.
"""
