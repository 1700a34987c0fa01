"""Taylor coefficients along curves by jets, by nested forward mode, and by interpolated values."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hodiff.audit.jets.curves import Curves, draw_from, moves
from hodiff.corrections import corrected
from hodiff.derivatives.products_by_route import push
from hodiff.taylor.jets import new_jet
from hodiff.taylor.passes import framed, through

# Half lengths of the intervals on which values are interpolated, and the number of points.
_RADII = (0.6, 0.3, 0.12, 0.05, 0.02, 0.008)
_POINTS = 15


@dataclass(frozen=True)
class Coefficients:
    """Taylor coefficients of one output.

    Attributes:
        numbers: The value, then the coefficients from the first up, with the directions as their first axis.
        errors: Error estimate of each number, in the same shapes; None if there is only rounding.
    """

    numbers: list[Tensor]
    errors: list[Tensor] | None = None


def by_jets(
    curves: Curves, order: int, *, collapsed: bool = False, observer: Callable[[Any], None] | None = None
) -> list[list[Tensor | None]]:
    """Compute the coefficients by one pass of Taylor mode; collapsed, the highest is summed over directions."""
    draw_from(curves.seed)
    with framed(order, curves.directions, collapsed=collapsed, observer=observer) as frame:
        jets = [
            new_jet(frame, [x.clone(), *own[: order - 1], own[order - 1].sum(0) if collapsed else own[order - 1]])
            for x, own in zip(curves.start, curves.terms, strict=True)
        ]
        found, _ = through(frame, curves.function, jets)
    return [each for each in found if moves(each[0])]


def by_nesting(curves: Curves, order: int) -> list[Coefficients]:
    """Compute the coefficients by nested forward mode in t, direction by direction, with hodiff's corrections."""

    def tower(direction: int, t: Any, height: int) -> tuple[Any, ...]:
        if height == 0:
            return (curves.along(direction, t),)
        values, slopes, _ = push(lambda t: (tower(direction, t, height - 1), ()), (t,), (torch.ones_like(t),))
        return (*values, slopes[-1])

    with corrected():
        rows = [tower(direction, torch.zeros((), dtype=torch.float64), order) for direction in range(curves.directions)]
    return [
        Coefficients([
            rows[0][0][i],
            *(torch.stack([row[k][i] for row in rows]) / math.factorial(k) for k in range(1, order + 1)),
        ])
        for i in range(len(rows[0][0]))
    ]


def by_values(curves: Curves, order: int) -> list[Coefficients]:
    """Compute the coefficients by interpolation of values at Chebyshev points, without derivative code."""
    # For each number, the interval that agrees best with its two neighbours gives the coefficient. Its error is the
    # larger of the two differences, as one difference may be small by chance.
    nodes, weights = _interpolation(order)
    rows = []
    with torch.no_grad():
        for direction in range(curves.directions):
            by_radius = []
            for radius in _RADII:
                values = [curves.along(direction, torch.tensor(radius * t, dtype=torch.float64)) for t in nodes]
                by_radius.append([
                    torch.einsum("kn,n...->k...", _scaled(weights, radius, each[0]), torch.stack(each))
                    for each in zip(*values, strict=True)
                ])
            rows.append([_best(each) for each in zip(*by_radius, strict=True)])
    start = curves.along(0, torch.zeros((), dtype=torch.float64))
    found = []
    for i, value in enumerate(start):
        numbers = [value.detach(), *(torch.stack([row[i][0][k] for row in rows]) for k in range(1, order + 1))]
        errors = [
            torch.zeros_like(value.real.detach() if value.is_complex() else value.detach()),
            *(torch.stack([row[i][1][k] for row in rows]) for k in range(1, order + 1)),
        ]
        found.append(Coefficients(numbers, errors))
    return found


def _interpolation(order: int) -> tuple[list[float], Tensor]:
    """Return Chebyshev points of (-1, 1), and weights that map values there to coefficients 0 to K."""
    nodes = np.cos(np.pi * (np.arange(_POINTS) + 0.5) / _POINTS)
    in_chebyshev = np.linalg.inv(np.polynomial.chebyshev.chebvander(nodes, _POINTS - 1))
    columns = [np.polynomial.chebyshev.cheb2poly(each)[: order + 1] for each in np.eye(_POINTS)]
    to_powers = np.zeros((order + 1, _POINTS))
    for j, column in enumerate(columns):
        to_powers[: len(column), j] = column
    return nodes.tolist(), torch.from_numpy(to_powers @ in_chebyshev)


def _scaled(weights: Tensor, radius: float, like: Tensor) -> Tensor:
    powers = torch.tensor([radius**-k for k in range(len(weights))], dtype=weights.dtype)
    return (weights * powers[:, None]).to(like.dtype)


def _best(by_radius: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Return the estimates that agree best with the intervals before and after, and their errors."""
    estimates = torch.stack(by_radius)
    gaps = (estimates[1:] - estimates[:-1]).abs().nan_to_num(math.inf)
    errors, places = torch.maximum(gaps[1:], gaps[:-1]).min(0)
    return estimates[1:-1].gather(0, places[None])[0], errors
