"""Training logs into measurements: steady state, FLOPs, comparison, loss curves and spikes,
recalibration, the next run.
"""
