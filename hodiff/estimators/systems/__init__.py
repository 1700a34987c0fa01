"""Linear systems by products alone, and what makes them easier."""
