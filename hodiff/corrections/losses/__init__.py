"""Rules for losses."""

from hodiff.corrections.losses import connectionist as _connectionist  # noqa: F401  (each enters its rules)
from hodiff.corrections.losses import constant_targets as _constant_targets  # noqa: F401
from hodiff.corrections.losses import cross_entropy as _cross_entropy  # noqa: F401
from hodiff.corrections.losses import margins as _margins  # noqa: F401
