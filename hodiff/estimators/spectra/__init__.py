"""Extreme eigenvalues, spectral densities and functions of a matrix, by Krylov spaces."""
