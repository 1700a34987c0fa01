"""Rules for sparse tensors with differentiable values."""
