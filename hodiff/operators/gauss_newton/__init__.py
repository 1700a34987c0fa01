"""Gauss-Newton and Fisher matrices as operators, and their exact diagonals."""
