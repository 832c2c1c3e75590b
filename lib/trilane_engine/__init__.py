"""The training engine: `python -m trilane_engine plan.json` under torchrun or srun. Only here is
torch imported.
"""
