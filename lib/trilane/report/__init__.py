"""Notebooks executed and shown: parameters, HTML reports, tables, widgets, plots."""
