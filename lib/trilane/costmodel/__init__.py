"""Seconds and bytes of a plan: the formulas, their calibration to measured rows, the uncertainty,
and the backtest.
"""
