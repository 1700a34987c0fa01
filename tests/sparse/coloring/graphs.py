"""Sparsity patterns for the tests of colorings, as dense boolean arrays."""

import numpy as np


def of_edges(n, edges, diagonal=True):
    pattern = np.eye(n, dtype=bool) & diagonal
    for i, j in edges:
        pattern[i, j] = pattern[j, i] = True
    return pattern


def band(n, below, above=None):
    i, j = np.ogrid[:n, :n]
    return (i - j <= below) & (j - i <= (below if above is None else above))


def arrow(n):
    return of_edges(n, [(0, j) for j in range(1, n)])


def cycle(n):
    return of_edges(n, [(i, (i + 1) % n) for i in range(n)])


def complete_bipartite(m, n):
    return of_edges(m + n, [(i, m + j) for i in range(m) for j in range(n)])


def binary_tree(n):
    return of_edges(n, [(i, (i - 1) // 2) for i in range(1, n)])


def grid(height, width, corners=False):
    """Return a grid graph with edges along the sides, and optionally the diagonals."""
    near = [(0, 1), (1, 0), *([(1, 1), (1, -1)] if corners else [])]
    points = [(i, j) for i in range(height) for j in range(width)]
    edges = [((i, j), (i + a, j + b)) for i, j in points for a, b in near if i + a < height and 0 <= j + b < width]
    return of_edges(len(points), [(i * width + j, k * width + m) for (i, j), (k, m) in edges])


def random_symmetric(n, density, diagonal=True, seed=0):
    generator = np.random.default_rng(seed)
    lower = np.tril(generator.random((n, n)) < density, -1)
    return lower | lower.T | (np.eye(n, dtype=bool) & diagonal)


def random_geometric(n, radius, seed=0):
    """Return a graph of random points in the unit square, with an entry for every pair of near points."""
    points = np.random.default_rng(seed).random((n, 2))
    return ((points[:, None] - points[None]) ** 2).sum(-1) <= radius**2


def random_matrix(m, n, density, seed=0):
    return np.random.default_rng(seed).random((m, n)) < density


SYMMETRIC = {
    "nothing": np.zeros((4, 4), bool),
    "no rows": np.zeros((0, 0), bool),
    "diagonal": np.eye(5, dtype=bool),
    "full": np.ones((6, 6), bool),
    "tridiagonal": band(17, 1),
    "band of 7": band(20, 3),
    "arrow": arrow(12),
    "cycle": cycle(9),
    "bipartite": complete_bipartite(3, 7),
    "tree": binary_tree(31),
    "5 points": grid(6, 7),
    "9 points": grid(5, 6, corners=True),
    "geometric": random_geometric(30, 0.3),
    "random": random_symmetric(25, 0.15),
    "without diagonal": random_symmetric(25, 0.15, diagonal=False, seed=1),
    "some of the diagonal": random_symmetric(20, 0.1, False, 2) | np.diag(np.arange(20) % 3 == 0),
}
ANY = {
    **SYMMETRIC,
    "wide": random_matrix(8, 20, 0.2),
    "tall": random_matrix(20, 8, 0.2, seed=1),
    "dense row and column": random_matrix(15, 18, 0.1) | np.eye(15, 18, dtype=bool) | (np.arange(18) == 3),
    "one-sided band": band(15, 0, 2),
    "antidiagonal": np.eye(6, dtype=bool)[::-1],
    "no columns": np.zeros((3, 0), bool),
}
