"""Contradictions in tables of measured runs that people typed: a file in, findings out."""
