"""Differentiation in torch: reverse and forward mode, the transforms of `torch.func`, and graphs."""
