"""K-FAC and EK-FAC optimizers, which find layers and the loss in the graph of the backward pass."""
