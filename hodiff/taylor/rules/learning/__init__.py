"""Rules for the functions of neural networks and their training."""
