"""The GPT of megatron-core layers: its parameters by name and their initial values, random numbers,
pipeline layers.
"""
