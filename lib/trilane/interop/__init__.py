"""DeepSpeed's JSON and Megatron's arguments: written from a plan, checked, and read back into a
plan.
"""
