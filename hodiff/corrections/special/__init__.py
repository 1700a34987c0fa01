"""Rules for `torch.special`."""
