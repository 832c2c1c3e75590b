"""The figures of the notebooks, one module a subject."""
