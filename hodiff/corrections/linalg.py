"""Rules for linear algebra."""

from hodiff.corrections import linalg_determinants as _determinants  # noqa: F401  (each enters its rules)
from hodiff.corrections import linalg_eigenvectors as _eigenvectors  # noqa: F401
from hodiff.corrections import linalg_reflectors as _reflectors  # noqa: F401
from hodiff.corrections import linalg_solve as _solve  # noqa: F401
from hodiff.corrections import linalg_symmetric as _symmetric  # noqa: F401
