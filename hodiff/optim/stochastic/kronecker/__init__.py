"""Optimizers with a matrix for each dimension of a parameter, made of its gradients alone."""
