"""Computations that are run again instead of remembered."""
