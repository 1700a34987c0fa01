"""Kernels that are faster than torch's operators, or than their usual order; public functions call them.

- `fused`: one pass over memory where torch takes several; C++ in `fused.cpp`, checked by `fused_build`, loaded by
  `fused_library`, and called as `fused_signatures` declares.
- `matrix_products`: the faster of MKL and oneDNN, measured once per class of shapes.
- `narrow`: products and softmax derivatives of matrices with few rows or columns.
- `transposed_blocks`: transposes of blocks of vectors, from columns into rows.
- `unit_directions`: products with unit directions, which pick columns.
- `coloring`: colorings of sparse matrices, in C++.

The folder is at the top level of the repository. `hodiff/kernels` is a link to it.
"""
