"""Rules of linear algebra: solutions, determinants, factorizations."""
