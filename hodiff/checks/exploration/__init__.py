"""Inputs around the given one, at which a function may go wrong: what `explore=True` tries."""
