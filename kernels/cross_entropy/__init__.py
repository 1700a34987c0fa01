"""Cross-entropy of a tile of logits: its elementwise part, in one pass over memory.

- `cpu`: float32 and float64 on a CPU, in C++; `rows.cpp` has the formulas.
"""
