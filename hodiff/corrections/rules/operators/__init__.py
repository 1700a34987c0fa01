"""Rules for the operators in `torch.ops.aten` that captured graphs call instead of functions."""
