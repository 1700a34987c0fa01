"""Conjugate gradients step by step, for optimizers that stop them by rules of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Iterate:
    r"""A point on the way to the minimum of $\phi(x) = \tfrac12 x^\top A x - b^\top x$.

    Attributes:
        count: How many steps were taken.
        x: The point.
        residual: The norm of $b - A x$.
        value: $\phi(x)$.
        descent: A direction of curvature zero or less, in which $\phi$ falls for ever; then it is the last iterate.
    """

    count: int
    x: Tensor
    residual: float
    value: float
    descent: Tensor | None = None


def iterates(
    product: Callable[[Tensor], Tensor], b: Tensor, start: Tensor | None = None, preconditioner: Tensor | None = None
) -> Iterator[Iterate]:
    """Solve `A x = b` for a symmetric A, until the residual is zero or curvature is not positive.

    Args:
        product: Multiplies with A.
        b: The right-hand side.
        start: Where to begin; by default at zero.
        preconditioner: The diagonal of a matrix near A; by default the identity.

    Yields:
        The iterates, the start first.
    """
    x = torch.zeros_like(b) if start is None else start.clone()
    residual = b.clone() if start is None else b - product(x)
    scaled = residual if preconditioner is None else residual / preconditioner
    direction, squared, count = scaled.clone(), float(residual @ scaled), 0
    while True:
        norm = squared**0.5 if preconditioner is None else float(torch.linalg.vector_norm(residual))
        yield Iterate(count, x, norm, -0.5 * float(x @ (b + residual)))
        if not squared:
            return
        multiplied = product(direction)
        curvature = float(direction @ multiplied)
        length = norm if preconditioner is None else float(torch.linalg.vector_norm(direction))
        # Rounding makes a curvature of zero a tiny one of either sign.
        if curvature <= torch.finfo(b.dtype).eps * float(torch.linalg.vector_norm(multiplied)) * length:
            yield Iterate(count, x, norm, -0.5 * float(x @ (b + residual)), descent=direction)
            return
        step = squared / curvature
        x = x + step * direction
        residual = residual - step * multiplied
        scaled = residual if preconditioner is None else residual / preconditioner
        before, squared = squared, float(residual @ scaled)
        direction = scaled + (squared / before) * direction
        count += 1
