r"""Steihaug's conjugate gradients: a step that lowers a quadratic model in a ball, also in smaller balls.

$$ \min_z\; g^T z + \tfrac12 z^T H z \quad\text{with}\quad \|z\|_M \le r $$

Source: T. Steihaug, SIAM J. Numer. Anal. 20 (1983); A. Conn, N. Gould & Ph. Toint, *Trust-Region Methods*, section
7.5.1, whose recurrences give norms and values of the model without additional products.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Map = Callable[[Tensor], Tensor]
# Factor by which the ball shrinks after a rejected step; the path is kept for such balls.
SHRINKAGE = 0.25


@dataclass(frozen=True)
class Segment:
    r"""Piece of the path, $z + t d$, where the model is a parabola.

    Attributes:
        value: Model at z.
        slope: Derivative with respect to t at z, negative.
        curvature: Second derivative with respect to t.
        square: $\\|z\\|_M^2$.
        cross: $z^T M d$.
        length: $\\|d\\|_M^2$.
    """

    z: Tensor
    d: Tensor
    value: float
    slope: float
    curvature: float
    square: float
    cross: float
    length: float

    def model(self, t: float) -> float:
        """Value of the model at t."""
        return self.value + t * (self.slope + t * self.curvature / 2)

    def to(self, radius: float) -> Step:
        """Return the step that ends at the ball's boundary."""
        spare = self.square - radius**2
        # Like SciPy, use the root formula without cancellation.
        half = self.cross + math.copysign(math.sqrt(max(self.cross**2 - self.length * spare, 0.0)), self.cross)
        ends = (0.0,) if half == 0 else tuple(sorted((-half / self.length, -spare / half)))
        # Along negative curvature the model may be lower at the other end.
        t = min(ends, key=self.model) if self.curvature <= 0 else ends[-1]
        return Step(torch.add(self.z, self.d, alpha=t), self.model(t), radius, True)


@dataclass(frozen=True)
class Step:
    """Step, with the model's change, the step's norm, and whether it ends at the boundary."""

    z: Tensor
    change: float
    norm: float
    bounded: bool


@dataclass(frozen=True)
class Path:
    """Step in a ball, and the pieces of the path on which it ends in balls that are smaller by `SHRINKAGE`."""

    step: Step
    pieces: tuple[Segment, ...]

    def within(self, radius: float) -> Step:
        """Return the step in a smaller ball, without a product."""
        return next(piece for piece in reversed(self.pieces) if piece.square <= radius**2).to(radius)


def steihaug(product: Map, g: Tensor, tolerance: float, radius: float, most: int, precondition: Map | None) -> Path:
    """Follow conjugate gradients until the residual's norm is below the tolerance, or to the ball's boundary."""
    z, r = torch.zeros_like(g), g
    y = r if precondition is None else precondition(r)
    d, ry = -y, float(torch.dot(r, y))
    square = cross = value = 0.0
    length = ry
    pieces: list[Segment] = []
    for _ in range(most):
        hd = product(d)
        curvature = float(torch.dot(d, hd))
        piece = Segment(z, d, value, -ry, curvature, square, cross, length)
        if not curvature > 0:
            return Path(piece.to(radius), (*pieces, piece))
        t = ry / curvature
        ahead = square + t * (2 * cross + t * length)
        if ahead >= radius**2:
            return Path(piece.to(radius), (*pieces, piece))
        if not pieces or _shrunken(radius, ahead) < _shrunken(radius, square):
            pieces.append(piece)
        z = torch.add(z, d, alpha=t)
        r = torch.add(r, hd, alpha=t)
        value, cross, square = piece.model(t), cross + t * length, ahead
        y = r if precondition is None else precondition(r)
        ry_ahead = float(torch.dot(r, y))
        size = math.sqrt(max(ry_ahead, 0.0)) if precondition is None else float(torch.linalg.vector_norm(r))
        if size < tolerance or not ry_ahead > 0:
            break
        beta = ry_ahead / ry
        d = torch.sub(beta * d, y)
        cross, length, ry = beta * cross, ry_ahead + beta**2 * length, ry_ahead
    return Path(Step(z, value, math.sqrt(square), False), tuple(pieces))


def _shrunken(radius: float, square: float) -> int:
    """Return how often the ball can shrink and still hold a point of this squared norm."""
    return math.floor(math.log(math.sqrt(square) / radius, SHRINKAGE)) if square > 0 else 10**6
