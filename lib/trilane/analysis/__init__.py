"""Training logs into measurements: steady state, FLOPs, loss curves and spikes,
recalibration, the next run.
"""
