"""Oracles for derivatives, which share no code with the function's own rules."""
