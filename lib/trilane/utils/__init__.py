"""Validation, atomic files, processes that die with their parent. Imports nothing of
trilane.
"""
