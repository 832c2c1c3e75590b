"""trilane: plan, run, read and recalibrate large GPT pre-training; TP x PP x DP are its three lanes."""

__version__ = "0.1.0"
