"""Rules for norms, distances and absolute values, and for functions of these lengths where a length is 0."""
