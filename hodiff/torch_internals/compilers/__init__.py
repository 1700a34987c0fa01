"""Compilers and tracers of torch: `torch.compile` and its parts, `make_fx`, `torch.jit`."""
