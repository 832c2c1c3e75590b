"""The GPT of megatron-core layers: specification, initial weights, parameters by name, random numbers, pipeline
layers.
"""
