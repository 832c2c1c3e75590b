"""What a run is: the model, the cluster, the parallelism (Topology), batch ramp-up, what each engine can do, and the
Plan that holds them all in one JSON file.
"""
