"""Checkpoints that any topology can load: slices, save, load, fingerprints, Hugging Face export."""
