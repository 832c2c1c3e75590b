"""From the lines of a log to its runs: one loop, with a cache from the form of a line to the places
of its numbers. Memory grows with the iterations: 210 bytes for one of 12 columns.
"""
