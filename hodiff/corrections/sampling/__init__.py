"""Rules for sampling from grids, and for dropout."""

from hodiff.corrections.sampling import sampling as _sampling  # noqa: F401  (each enters its rules)
