"""Rules for scattering, reducing by index, and cumulative products."""

from hodiff.corrections import indexing_products as _products  # noqa: F401  (each enters its rules)
from hodiff.corrections import indexing_reductions as _reductions  # noqa: F401
from hodiff.corrections import indexing_splits as _splits  # noqa: F401
from hodiff.corrections import indexing_strides as _strides  # noqa: F401
