"""Rules for scattering, reducing by index, embeddings, and cumulative products."""

from hodiff.corrections.indexing import embedding as _embedding  # noqa: F401  (each enters its rules)
from hodiff.corrections.indexing import products as _products  # noqa: F401
from hodiff.corrections.indexing import reductions as _reductions  # noqa: F401
from hodiff.corrections.indexing import splits as _splits  # noqa: F401
from hodiff.corrections.indexing import strides as _strides  # noqa: F401
