"""Rules for elementwise functions: powers, powers of two, sinc, logit, polar coordinates."""
