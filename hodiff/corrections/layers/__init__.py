"""Rules for layers of networks: attention, convolutions, pooling, normalizations."""
