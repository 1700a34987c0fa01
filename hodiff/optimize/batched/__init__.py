"""Solvers for many small problems at once: tensors have a row for each problem, and problems end separately."""
