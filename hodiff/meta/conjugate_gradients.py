"""Conjugate gradients on lists of tensors, for one system or for many at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(eq=False)
class Solution:
    """A solution of linear systems.

    Attributes:
        value: The solution, in the shapes of the right-hand side.
        residual: Norm of the residual over that of the right-hand side, one for each system.
        products: How many products with the matrix it took.
    """

    value: list[Tensor]
    residual: Tensor
    products: int


def conjugate_gradients(
    product: Callable[[list[Tensor]], Sequence[Tensor]],
    b: Sequence[Tensor],
    *,
    steps: int,
    tolerance: float,
    systems: int = 0,
) -> Solution:
    r"""Solve $A x = b$ for a symmetric positive definite matrix that is given by its products.

    Args:
        product: Multiplies by A.
        b: Right-hand side.
        steps: Most products.
        tolerance: Relative residual to stop at.
        systems: How many leading dimensions count systems: 0 for one, 1 for a batch of them.

    Returns:
        The solution and how good it is.

    Source: M. R. Hestenes & E. Stiefel, "Methods of conjugate gradients for solving linear systems", 1952, eq. 3:1.
    """

    def dot(u: Sequence[Tensor], v: Sequence[Tensor]) -> Tensor:
        return torch.stack([(p * q).flatten(systems).sum(-1) for p, q in zip(u, v, strict=True)]).sum(0)

    def moved(u: Sequence[Tensor], factor: Tensor, v: Sequence[Tensor]) -> list[Tensor]:
        return [p + factor.reshape(factor.shape + (1,) * (q.dim() - systems)) * q for p, q in zip(u, v, strict=True)]

    x = [torch.zeros_like(each) for each in b]
    r, p = list(b), list(b)
    squared = start = dot(b, b)
    done = 0
    while done < steps and bool((squared > tolerance**2 * start).any()):
        q = list(product(p))
        curvature = dot(p, q)
        # A system that is solved already, or has no curvature along p, stays where it is.
        alpha = torch.where(curvature > 0, squared / torch.where(curvature > 0, curvature, 1.0), 0.0)
        x, r = moved(x, alpha, p), moved(r, -alpha, q)
        before, squared = squared, dot(r, r)
        p = moved(r, torch.where(before > 0, squared / torch.where(before > 0, before, 1.0), 0.0), p)
        done += 1
        if bool((alpha == 0).all()):
            break
    positive = start > 0
    residual = torch.where(positive, squared / torch.where(positive, start, 1.0), 0.0).sqrt()
    return Solution(x, residual, done)
