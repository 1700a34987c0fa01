r"""Directions whose fourth powers sum to the square of the squared length: $\sum_r w_r (v_r \cdot \xi)^4 = |\xi|^4$.

The fewest directions are three of a hexagon in the plane, and six of an icosahedron in space. More dimensions use the
vertices of a simplex and the midpoints of its edges, (n+1)(n+2)/2 directions (I. P. Mysovskikh, 1968).
"""

from __future__ import annotations

import math
from itertools import combinations

import torch
from torch import Tensor

# Above this dimension some weights are negative.
ALL_ABOVE = 7


def fourth_powers(n: int) -> list[tuple[int, Tensor]]:
    """Pairs of a sign and the directions (R, n) with that sign, whose lengths include the weights."""
    known = {1: _line, 2: _hexagon, 3: _icosahedron}
    return [(1, known[n]())] if n in known else _simplex(n)


def _line() -> Tensor:
    return torch.ones(1, 1, dtype=torch.float64, device="cpu")


def _hexagon() -> Tensor:
    angles = torch.arange(3, dtype=torch.float64, device="cpu") * (math.pi / 3)
    return torch.stack((angles.cos(), angles.sin()), 1) * (8 / 9) ** 0.25


def _icosahedron() -> Tensor:
    golden = (1 + 5**0.5) / 2
    pairs = [(1.0, golden), (1.0, -golden)]
    rows = [[0, a, b] for a, b in pairs] + [[a, b, 0] for a, b in pairs] + [[b, 0, a] for a, b in pairs]
    found = torch.tensor(rows, dtype=torch.float64, device="cpu")
    return found / found.norm(dim=1, keepdim=True) * (5 / 6) ** 0.25


def _simplex(n: int) -> list[tuple[int, Tensor]]:
    vertices = _vertices(n)
    edges = torch.stack([vertices[i] + vertices[j] for i, j in combinations(range(n + 1), 2)])
    edges = edges / edges.norm(dim=1, keepdim=True)
    # The mean of the fourth power over the sphere is 3 / (n (n + 2)).
    whole = n * (n + 2) / 3
    at_vertices = whole * n * (7 - n) / ((n + 1) ** 2 * (n + 2))
    at_edges = whole * 4 * (n - 1) ** 2 / (n * (n + 1) ** 2 * (n + 2))
    edges, vertices = edges * at_edges**0.25, vertices * abs(at_vertices) ** 0.25
    if n < ALL_ABOVE:
        return [(1, torch.cat((edges, vertices)))]
    return [(1, edges)] if n == ALL_ABOVE else [(1, edges), (-1, vertices)]


def _vertices(n: int) -> Tensor:
    """Unit vectors (n + 1, n) with products -1/n."""
    corners = math.sqrt(1 + 1 / n) * torch.eye(n, dtype=torch.float64, device="cpu") - (math.sqrt(n + 1) + 1) / n**1.5
    return torch.cat((corners, torch.full((1, n), n**-0.5, dtype=torch.float64, device="cpu")))
