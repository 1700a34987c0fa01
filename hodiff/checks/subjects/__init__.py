"""Calls of modules and torch functions, as problems of a few numbers whose routes are compared."""
