"""Markdown and CSV tables of measured runs that people typed: read into rows, and checked for contradictions."""
