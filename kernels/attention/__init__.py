"""Attention by tiles: value, gradient, and the tangents of both, without a tensor of the size of the weights.

- `cpu`: float32 and float64 on a CPU, in C++: `tiles.cpp` says what is computed, `tiles.inc` how; `problem` describes a
  call.
- `triton_attention`: on a GPU, or in Triton's interpreter; `triton_call` has the arguments of a call,
  `triton_output` and `triton_gradients` its passes, `triton_tiles` the formulas on each tile, `triton_blocks` the sizes
  of tiles, `triton_launch` the launches. Importing it imports Triton.
- `options`: the options of attention.
"""
