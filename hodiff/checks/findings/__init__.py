"""Defects that a check can name, and their diagnosis."""
