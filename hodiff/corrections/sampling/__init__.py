"""Rules for sampling from grids, and for dropout."""
