"""Checks at invented inputs around the given input, for `explore=True`."""
