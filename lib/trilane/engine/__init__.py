"""The training engine: `python -m trilane.engine plan.json` under torchrun or srun. Only here is
torch imported.
"""
