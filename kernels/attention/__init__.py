"""Attention and its derivatives to second order in kernels that hold a tile of the weights at a time.

What is taken from torch, from C++ and from Triton stands in a file each, and none is imported before a tensor needs it.
"""
