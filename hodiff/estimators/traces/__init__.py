"""Traces, diagonals and norms from products with random vectors."""
