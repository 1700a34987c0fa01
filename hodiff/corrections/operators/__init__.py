"""Rules for the operators in `torch.ops.aten`, by which captured graphs call what users call by functions."""
