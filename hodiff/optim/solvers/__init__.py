"""Optimizers that solve for their step by conjugate gradients, in the graph of a closure."""
