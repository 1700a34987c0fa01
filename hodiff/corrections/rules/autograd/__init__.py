"""Rules for gradient modes, checkpoints and custom Functions."""
