"""Rules for elementwise functions, also of lists: powers, kinks, tails, activations, sums in the log domain."""
