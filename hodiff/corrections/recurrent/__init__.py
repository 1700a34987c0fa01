"""Rules for recurrent networks and packed sequences."""

from hodiff.corrections.recurrent import networks as _networks  # noqa: F401  (each enters its rules)
