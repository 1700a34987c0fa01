"""What compiles and traces: `torch.compile` and its parts, `make_fx`, `torch.jit`."""
