"""When a run will be finished, what it costs and how likely it passes either limit: the schedule of
a batch ramp-up, interruptions, simulated dates, alternatives, and the decision.
"""
