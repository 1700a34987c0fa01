"""Activations, smooth and piecewise linear."""
