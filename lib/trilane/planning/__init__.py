"""Model shapes of a target size, and every topology of a cluster predicted, checked and ranked."""
