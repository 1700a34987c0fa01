"""Check of a function at a point: comparisons, then probes, then the diagnosis."""
