"""Recomputation of results instead of storing them."""
