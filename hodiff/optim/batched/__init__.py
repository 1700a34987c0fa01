"""Many small problems at once: every tensor has a row for each problem, and each problem ends on its own."""
