"""Greedy colorings of sparse matrices in C++: `greedy.cpp` computes them, `greedy` calls it with NumPy arrays."""
