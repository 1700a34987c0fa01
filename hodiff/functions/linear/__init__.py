"""Linear layers, and sums and scalings of tensors."""
