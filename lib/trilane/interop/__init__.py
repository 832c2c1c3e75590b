"""Plans as DeepSpeed JSON and as the arguments of Megatron-LM and Megatron-DeepSpeed, and back."""
