"""Rules for distances between the rows of matrices."""

from hodiff.corrections.distances import distances as _distances  # noqa: F401  (each enters its rules)
