"""NumPy and SciPy code as differentiable functions."""
