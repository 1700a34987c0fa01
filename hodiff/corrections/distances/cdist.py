"""Rules for distances between the rows of matrices."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hodiff.corrections.declining import INVALID
from hodiff.corrections.distances.euclidean import EuclideanDistances, SquaredDistances
from hodiff.corrections.distances.lengths import rows_norm
from hodiff.corrections.distances.squares import remembered
from hodiff.corrections.registry import register
from hodiff.routes import ROUTES
from hodiff.rules.elementwise import ElementwiseFunction

# Compute modes of torch.cdist for Euclidean distances, with the numbers that its kernel takes.
_COMPUTE_MODES = {
    "use_mm_for_euclid_dist_if_necessary": None,
    "use_mm_for_euclid_dist": 1,
    "donot_use_mm_for_euclid_dist": 2,
}

_missing = partial(
    register,
    kind="missing",
    routes=ROUTES,
    reason="neither a forward rule nor a second derivative is implemented",
    reference="the derivatives of |δ|ₚ; 0 at coincident points, as torch's first derivative",
)


class Differs(ElementwiseFunction):
    """1 where the input is not zero, with the derivative 0."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        """Compare with zero."""
        return (x != 0).to(x.dtype)

    @staticmethod
    def slope(index: int, x: Tensor) -> float:
        """Zero."""
        return 0.0


def _are_taken(*tensors: Any) -> bool:
    """Whether torch has kernels for the tensors."""
    return all(isinstance(each, Tensor) and each.dtype in (torch.float32, torch.float64) for each in tensors)


@_missing(torch.cdist)
def _cdist(x1: Tensor, x2: Tensor, p: float = 2.0, compute_mode: str = "use_mm_for_euclid_dist_if_necessary") -> Any:
    if (
        not _are_taken(x1, x2)
        or min(x1.dim(), x2.dim()) < 2
        or x1.shape[-1] != x2.shape[-1]
        or x1.dtype != x2.dtype
        or not isinstance(p, (int, float))
        or p < 0
        or compute_mode not in _COMPUTE_MODES
    ):
        return INVALID
    if p == 2 and not torch.compiler.is_compiling():
        batch = torch.broadcast_shapes(x1.shape[:-2], x2.shape[:-2])
        x1, x2 = (each.expand(*batch, *each.shape[-2:]) for each in (x1, x2))
        mode = _COMPUTE_MODES[compute_mode]
        lengths = EuclideanDistances.call(x1, x2, mode)
        return remembered(lengths, lambda: SquaredDistances.call(x1, x2, mode), held=(x1, x2))
    return _length(x1.unsqueeze(-2) - x2.unsqueeze(-3), p)


@_missing(torch.pdist, F.pdist, name="torch.nn.functional.pdist")
def _pdist(input: Tensor, p: float = 2.0) -> Any:
    if not _are_taken(input) or input.dim() != 2 or not isinstance(p, (int, float)) or p < 0:
        return INVALID
    first, second = torch.triu_indices(input.shape[0], input.shape[0], 1, device=input.device)
    return _length(input.index_select(0, first) - input.index_select(0, second), p)


def _length(difference: Tensor, p: float) -> Tensor:
    """Norm of order p of the last dimension. Derivatives are 0 where the norm is 0, and at coordinates with a kink."""
    if p == 0:
        return Differs.call(difference).sum(-1)
    if p == math.inf:
        return _largest(difference.abs())
    if p == 1:
        return difference.abs().sum(-1)
    return rows_norm(difference, p)


def _largest(sizes: Tensor) -> Tensor:
    """Maximum of the last dimension; all tied elements have the derivative 1, as in torch."""
    if not sizes.shape[-1]:
        return sizes.sum(-1)
    fixed = sizes.detach()
    top = fixed.amax(-1)
    ties = (fixed == top.unsqueeze(-1)).sum(-1)
    together = torch.where(fixed == top.unsqueeze(-1), sizes, 0).sum(-1)
    return torch.where(ties > 1, together - torch.where(ties > 1, (ties - 1) * top, 0), sizes.amax(-1))
