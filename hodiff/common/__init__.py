"""Helpers that derivatives, operators, estimators, implicit functions, inner loops and plots share."""
