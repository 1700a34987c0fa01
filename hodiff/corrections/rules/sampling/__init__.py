"""Rules for random and grid sampling: dropout, and `grid_sample`."""
