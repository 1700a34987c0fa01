"""Commands of ``python -m hodiff``."""
