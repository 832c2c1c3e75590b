"""Data classes that describe a run: model, cluster, parallelism (Topology), batch ramp-up, what
each engine supports, and the Plan that holds them all in one JSON file.
"""
