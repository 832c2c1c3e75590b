"""Validation, atomic files, processes that die with their parent, progress bars. Imports nothing of
trilane.
"""
