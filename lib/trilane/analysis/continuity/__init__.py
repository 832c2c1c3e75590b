"""What the restarts of a training did not continue, by its logs alone: the breaks, and the rules that find them."""
