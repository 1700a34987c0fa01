"""Patterns of sparse symmetric matrices: bands, grids, random patterns, and neighbours in a square."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse
from scipy.spatial import cKDTree


def banded(n: int, rho: int) -> Any:
    """Return a band with rho entries beside the diagonal in each row, as in the paper."""
    offsets = range(-(rho // 2), rho // 2 + 1)
    return scipy.sparse.diags_array([np.ones(n - abs(k)) for k in offsets], offsets=offsets).tocsr()


def grid(side: int, corners: bool) -> Any:
    """Return the 5-point or the 9-point stencil on a square."""
    path = banded(side, 2)
    one = scipy.sparse.eye_array(side)
    near = scipy.sparse.kron(path, path) if corners else scipy.sparse.kron(path, one) + scipy.sparse.kron(one, path)
    return scipy.sparse.csr_array(near)


def scattered(n: int, entries: int) -> Any:
    """Return random entries, with `entries` a row on average."""
    generator = np.random.default_rng(0)
    i, j = generator.integers(0, n, (2, n * entries // 2))
    half = scipy.sparse.coo_array((np.ones(len(i)), (i, j)), shape=(n, n))
    return (half + half.T + scipy.sparse.eye_array(n)).tocsr()


def geometric(n: int, entries: int) -> Any:
    """Return entries for random points in a square that are near each other."""
    points = np.random.default_rng(0).random((n, 2))
    pairs = cKDTree(points).query_pairs((entries / (np.pi * n)) ** 0.5, output_type="ndarray")
    half = scipy.sparse.coo_array((np.ones(len(pairs)), pairs.T), shape=(n, n))
    return (half + half.T + scipy.sparse.eye_array(n)).tocsr()


def matrices(n: int) -> dict[str, Any]:
    """Return the patterns by name; banded and random patterns are also in the paper."""
    side = round(n**0.5)
    return {
        "banded, 10": banded(n, 10),
        "banded, 20": banded(n, 20),
        "random, 10": scattered(n, 10),
        "random, 20": scattered(n, 20),
        "geometric, 20": geometric(n, 20),
        "5-point grid": grid(side, corners=False),
        "9-point grid": grid(side, corners=True),
    }
