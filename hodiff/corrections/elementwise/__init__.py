"""Rules for elementwise functions: powers, powers of two, kinks, sinc, logit, polar coordinates."""
