"""Rules for linear algebra."""

from hodiff.corrections.linalg import determinants as _determinants  # noqa: F401  (each enters its rules)
from hodiff.corrections.linalg import eigenvectors as _eigenvectors  # noqa: F401
from hodiff.corrections.linalg import reflectors as _reflectors  # noqa: F401
from hodiff.corrections.linalg import solve as _solve  # noqa: F401
from hodiff.corrections.linalg import symmetric as _symmetric  # noqa: F401
