"""Sparse tensors, made of values that are differentiated."""
