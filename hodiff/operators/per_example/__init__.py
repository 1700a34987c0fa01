"""Gradients of the examples of a batch: sums of squares, norms, and the gradients themselves."""
