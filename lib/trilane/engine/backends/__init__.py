"""One module an engine: what builds, steps and states each of the four systems."""
