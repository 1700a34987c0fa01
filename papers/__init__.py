"""Reproductions of published claims with hodiff."""
