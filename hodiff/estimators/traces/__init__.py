"""What products with random vectors tell of the diagonal: traces, diagonals, norms."""
