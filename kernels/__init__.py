"""Faster arrangements of torch kernels, behind the public functions of hodiff."""
