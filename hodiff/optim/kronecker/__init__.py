"""Optimizers with a preconditioner matrix for each dimension of a parameter, computed from gradients alone."""
