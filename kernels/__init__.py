"""What runs faster than torch's own operators, or than their usual order; the public functions stand in front of it.

- `fused`: one pass over memory for what torch does in several; C++ in `fused.cpp`, loaded by `fused_library`
  where it is what `fused_build` says it must be, and called as `fused_signatures` declares.
- `matrix_products`: the faster of MKL and oneDNN, measured once a shape.
- `narrow`: products and softmax derivatives of matrices with few rows or columns.
- `turning`: blocks of vectors, from columns into rows.
- `unit_directions`: products with unit directions, which pick columns.
- `coloring`: colorings of sparse matrices, in C++.

The folder stands at the top level of the repository and is installed as `hodiff.kernels`.
"""
