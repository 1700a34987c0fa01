"""From products with a coloring's seeds to the entries of a sparse matrix, and to the matrix.

- `products`: products of Hessians and Jacobians with blocks of vectors, in groups.
- `entries`, `recover`: what `Coloring.decompress` does, with tensors; differentiable, and under vmap.
- `layouts`: the entries as a matrix of torch or SciPy.
- `agreement`: whether a matrix has all that the derivative has, by a random vector.
- `coloring`: the coloring that a call uses.
"""
