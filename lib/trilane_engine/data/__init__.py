"""From text to batches: sources and tokenizers, Megatron .bin/.idx pairs, the loader."""
