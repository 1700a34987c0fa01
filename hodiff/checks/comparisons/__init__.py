"""Comparisons of a function's derivatives with each other and with oracles."""
