"""Attention by tiles: its value, gradient, and the tangents of both, with nothing of the size of the weights.

- `cpu`: float32 and float64 on a CPU, in C++: `tiles.cpp` says what is computed, `tiles.inc` how; `problem` describes a
  call.
- `triton_attention`: on a GPU, or in Triton's interpreter; `triton_output` and `triton_gradients` have its passes,
  `triton_tiles` what each tile computes, `triton_blocks` the sizes of tiles. Triton is imported with it alone.
- `options`: the numbers of an attention.
"""
