"""Attention and its derivatives to second order, in kernels that hold a block of the weights at a time.

`triton_attention` stands in front of the `triton_` files; importing it needs triton, so nothing imports it before a
tensor on a GPU needs it.
"""
