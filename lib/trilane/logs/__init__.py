"""Training logs of any framework: a file in, one RunLog for each run out."""
