"""What Krylov spaces tell of eigenvalues: the ends of a spectrum, its density, functions of a matrix."""
