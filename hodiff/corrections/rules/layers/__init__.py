"""Rules for layers of networks: attention, convolutions, pooling, and normalization of data and of weights."""
