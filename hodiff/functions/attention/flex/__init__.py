"""Attention under functions of the scores and of the positions."""
