"""From products with a coloring's seeds to the entries of a sparse matrix, and to the matrix.

- `products`: products of Hessians and Jacobians with blocks of vectors, in groups.
- `recover`: the entries from the products.
- `agreement`: whether a matrix has all that the derivative has, by a random vector.
- `coloring`: the coloring that a call uses.
"""
