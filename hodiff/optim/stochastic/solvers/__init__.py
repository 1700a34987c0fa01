"""Optimizers that solve equations for their step by conjugate gradients, in a closure's graph."""
