"""Linear systems by products alone, and preconditioners."""
