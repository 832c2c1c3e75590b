"""From text to batches: sources, tokenizer, corpus, Megatron .bin/.idx pairs, the loader."""
