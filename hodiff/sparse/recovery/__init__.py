"""Recovery of a sparse matrix from products with its coloring's seeds.

- `products`: products of Hessians and Jacobians with blocks of vectors, in groups.
- `recover`: the entries from the products.
- `agreement`: comparison of a matrix with the derivative, by random vectors.
- `coloring`: the coloring that a call uses.
"""
