"""hodiff's own rules for torch functions, applied wherever they are called."""

# Imported for what they do: each family enters its rules in the registry.
from hodiff.corrections import activations as _activations  # noqa: F401
from hodiff.corrections import attention as _attention  # noqa: F401
from hodiff.corrections import convolution as _convolution  # noqa: F401
from hodiff.corrections import distances as _distances  # noqa: F401
from hodiff.corrections import guards as _guards  # noqa: F401
from hodiff.corrections import indexing as _indexing  # noqa: F401
from hodiff.corrections import linalg as _linalg  # noqa: F401
from hodiff.corrections import logarithms as _logarithms  # noqa: F401
from hodiff.corrections import losses as _losses  # noqa: F401
from hodiff.corrections import normalization as _normalization  # noqa: F401
from hodiff.corrections import pooling as _pooling  # noqa: F401
from hodiff.corrections import recurrent as _recurrent  # noqa: F401
from hodiff.corrections import sampling as _sampling  # noqa: F401
from hodiff.corrections.mode import Corrections as Corrections
from hodiff.corrections.mode import corrected as corrected
from hodiff.corrections.registry import Correction as Correction
from hodiff.corrections.registry import register as register
from hodiff.corrections.registry import table as table
from hodiff.corrections.registry import unregister as unregister
