"""How a function becomes a graph: traced once, with the numbers that it read on the way as conditions in the graph."""
