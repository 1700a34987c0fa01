"""K-FAC and EK-FAC as optimizers: layers and the loss are found in the graph that backward goes through."""
