"""Rules for distances between the rows of matrices."""
