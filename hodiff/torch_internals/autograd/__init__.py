"""What differentiates: reverse and forward mode, the transforms of `torch.func`, and graphs."""
