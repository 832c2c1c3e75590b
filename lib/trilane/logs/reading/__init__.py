"""From the lines of a log to its runs: one loop, which passes over lines like those that held
nothing. Memory grows with the iterations: about 1 kB for one of 12 columns.
"""
