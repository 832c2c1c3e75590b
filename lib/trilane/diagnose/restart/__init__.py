"""Restarts: the fingerprints that a save left against those of the load, by rank and tensor."""
