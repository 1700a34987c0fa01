"""Rules for linear algebra: solutions, determinants, factorizations."""
