"""Iterates of conjugate gradients, for optimizers with their own stopping rules."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from hodiff.optim.stochastic.magnitudes import norm_of


@dataclass(frozen=True)
class Iterate:
    r"""Iterate in the minimisation of $\phi(x) = \tfrac12 x^\top A x - b^\top x$.

    Attributes:
        count: Number of steps.
        x: Current point.
        residual: Norm of $b - A x$.
        value: $\phi(x)$.
        descent: Direction of curvature zero or less, in which $\phi$ falls without bound; only in the last iterate.
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
        product: Product with A.
        b: Right-hand side.
        start: Start; by default zero.
        preconditioner: Diagonal of an approximation of A; by default the identity.

    Yields:
        Iterates, beginning with the start.
    """
    residual = b.clone() if start is None else b - product(start)
    # Squares of large and small numbers are out of the range of the dtype; a power of two rounds nothing.
    largest = float(torch.stack([b.abs().max(), residual.abs().max()]).max()) if b.numel() else 0.0
    scale = math.ldexp(1.0, math.frexp(largest)[1] - 1) if largest and math.isfinite(largest) else 1.0
    b, residual = b / scale, residual / scale
    x = torch.zeros_like(b) if start is None else start / scale
    scaled = residual if preconditioner is None else residual / preconditioner
    direction, squared, count = scaled.clone(), float(residual @ scaled), 0
    while True:
        norm = squared**0.5 if preconditioner is None else norm_of(residual)
        value = -0.5 * float(x @ (b + residual)) * scale * scale
        yield Iterate(count, x * scale, norm * scale, value)
        if not squared:
            return
        multiplied = product(direction)
        curvature = float(direction @ multiplied)
        length = norm if preconditioner is None else norm_of(direction)
        # Rounding makes a curvature of zero a tiny one of either sign.
        if curvature <= torch.finfo(b.dtype).eps * norm_of(multiplied) * length:
            yield Iterate(count, x * scale, norm * scale, value, descent=direction * scale)
            return
        step = squared / curvature
        x = x + step * direction
        residual = residual - step * multiplied
        scaled = residual if preconditioner is None else residual / preconditioner
        before, squared = squared, float(residual @ scaled)
        direction = scaled + (squared / before) * direction
        count += 1
