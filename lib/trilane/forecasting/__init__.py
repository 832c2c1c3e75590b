"""When a run will be finished and what it costs: the schedule of a batch ramp-up, failures, simulated dates, the
decision.
"""
