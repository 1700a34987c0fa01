r"""Rules for distances between the rows of matrices.

Euclidean distances of all pairs of rows, with derivatives of every order in the memory of the distances.

Two maps, of weights $G$ (P, R) and of directions $u$ (P, M), give the derivatives:

$$ W(G)_i = \sum_j G_{ij} (x_i - y_j), \qquad I(u)_{ij} = u_i \cdot (x_i - y_j), $$

The maps are transposes of each other. The gradient of $d_{ij} = |x_i - y_j|$ is $W(\bar d / d)$, its derivative along
$u$ is $I(u) / d$.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hodiff.corrections.mechanism.declining import INVALID
from hodiff.corrections.mechanism.registry import register
from hodiff.corrections.mechanism.values import save_inputs
from hodiff.corrections.rules.distances.lengths import remembered
from hodiff.corrections.rules.distances.p_norms import rows_norm
from hodiff.routes import ROUTES
from hodiff.rules.any_order import AnyOrderFunction
from hodiff.rules.elementwise import ElementwiseFunction
from hodiff.rules.nesting import nestable_jvp
from hodiff.torch_internals.operators import distances, distances_gradient

# The kernel's compute mode without a matrix product, in which equal points have the distance 0.
_EXACT = 2
# Number of points up to which torch uses that mode by default.
_FEW = 25


class EuclideanDistances(AnyOrderFunction):
    """Distances $d$ of all pairs. Derivatives divide by the exact distance, in every compute mode."""

    @staticmethod
    def forward(x: Tensor, y: Tensor, mode: int | None) -> Tensor:
        """Distances (..., P, R) of the rows of x (..., P, M) and y (..., R, M)."""
        return distances(x, y, 2.0, mode)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save the points."""
        del output
        x, y, ctx.mode = inputs
        ctx.save_for_backward(x, y)
        ctx.save_for_forward(x, y)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor | None) -> Any:
        r"""Return $W(\bar d / d)$ for both inputs."""
        if cotangent is None:
            return None, None, None
        x, y = ctx.saved_tensors
        return _pulled(ctx, _divided(cotangent, x, y))

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, x_t: Tensor | None, y_t: Tensor | None, _: None) -> Tensor:
        """Return $I(u) / d$, summed over both inputs."""
        return _divided(_pushed(ctx, x_t, y_t), *ctx.saved_tensors)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, y: Tensor, mode: int | None) -> tuple[Tensor, int]:
        """Move the batch to the front."""
        x, y = _in_front(info.batch_size, in_dims, (x, y))
        return EuclideanDistances.call(x, y, mode), 0


class SquaredDistances(AnyOrderFunction):
    r"""Squared distances $d^2$ of all pairs, smooth at equal points: gradient $W(2 \bar y)$, tangent $2 I(u)$."""

    @staticmethod
    def forward(x: Tensor, y: Tensor, mode: int | None) -> Tensor:
        """Square the distances."""
        return distances(x, y, 2.0, mode).square()

    setup_context = EuclideanDistances.setup_context

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor | None) -> Any:
        r"""Return $W(2 \bar y)$ for both inputs."""
        return (None, None, None) if cotangent is None else _pulled(ctx, 2 * cotangent)

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, x_t: Tensor | None, y_t: Tensor | None, _: None) -> Tensor:
        """Return $2 I(u)$, summed over both inputs."""
        return 2 * _pushed(ctx, x_t, y_t)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, y: Tensor, mode: int | None) -> tuple[Tensor, int]:
        """Move the batch to the front."""
        x, y = _in_front(info.batch_size, in_dims, (x, y))
        return SquaredDistances.call(x, y, mode), 0


def _pulled(ctx: Any, weights: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    """Apply the map $W$ for both inputs."""
    x, y = ctx.saved_tensors
    needs_x, needs_y, _ = ctx.needs_input_grad
    by = _weighted_by_products if _takes_products(ctx.mode, x, y) else WeightedDifferences.call
    return by(weights, x, y) if needs_x else None, by(weights.mT, y, x) if needs_y else None, None


def _pushed(ctx: Any, x_t: Tensor | None, y_t: Tensor | None) -> Tensor:
    """Apply the map $I$ for both inputs, and sum."""
    x, y = ctx.saved_tensors
    terms = []
    if x_t is not None:
        terms.append(_projections(x_t, x, y))
    if y_t is not None:
        terms.append(_projections(y_t, y, x).mT)
    return terms[0] if len(terms) == 1 else terms[0] + terms[1]


class WeightedDifferences(AnyOrderFunction):
    """The map $W$, by torch's kernel for the gradient of distances, which subtracts before it sums."""

    @staticmethod
    def forward(weights: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Sum (..., P, M) of the differences of x (..., P, M) and y (..., R, M), with weights (..., P, R)."""
        weights, x, y = weights.contiguous(), x.contiguous(), y.contiguous()
        return distances_gradient(weights, x, y, 2.0, torch.ones_like(weights))

    setup_context = staticmethod(save_inputs)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor | None) -> Any:
        """Gradients of the weights, by the map $I$, and of x and y."""
        if cotangent is None:
            return None, None, None
        weights, x, y = ctx.saved_tensors
        needs_weights, needs_x, needs_y = ctx.needs_input_grad
        return (
            _projections(cotangent, x, y) if needs_weights else None,
            weights.sum(-1, keepdim=True) * cotangent if needs_x else None,
            -(weights.mT @ cotangent) if needs_y else None,
        )

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, weights_t: Tensor | None, x_t: Tensor | None, y_t: Tensor | None) -> Tensor:
        """Product rule."""
        weights, x, y = ctx.saved_tensors
        tangent: Any = 0
        if weights_t is not None:
            tangent = tangent + WeightedDifferences.call(weights_t, x, y)
        if x_t is not None:
            tangent = tangent + weights.sum(-1, keepdim=True) * x_t
        if y_t is not None:
            tangent = tangent - weights @ y_t
        return tangent

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], weights: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, int]:
        """Move the batch to the front."""
        return WeightedDifferences.call(*_in_front(info.batch_size, in_dims, (weights, x, y))), 0


def _projections(u: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """The map $I$, by a matrix product around the centre of y, so that a common offset costs no digits."""
    centre = _centre(y)
    return (u * (x - centre)).sum(-1, keepdim=True) - u @ (y - centre).mT


def _weighted_by_products(weights: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """The map $W$, by a matrix product; ten times faster than the kernel for many points."""
    centre = _centre(y)
    return weights.sum(-1, keepdim=True) * (x - centre) - weights @ (y - centre)


def _centre(y: Tensor) -> Tensor:
    """Mean of the points; 0 without points, where a mean is NaN."""
    return y.detach().sum(-2, keepdim=True) / max(y.shape[-2], 1)


def _takes_products(mode: int | None, x: Tensor, y: Tensor) -> bool:
    """Whether torch computes the distances by a matrix product."""
    return mode == 1 or (mode is None and max(x.shape[-2], y.shape[-2]) > _FEW)


def _divided(numerator: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Divide by the distances; 0 where a distance is 0."""
    distances = EuclideanDistances.call(x, y, _EXACT)
    zero = distances == 0
    return torch.where(zero, 0, numerator / torch.where(zero, 1, distances))


def _in_front(size: int, in_dims: tuple[Any, ...], tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the tensors with the batch as first dimension."""
    return tuple(
        each.expand(size, *each.shape) if dim is None else each.movedim(dim, 0)
        for each, dim in zip(tensors, in_dims, strict=False)
    )


# Compute modes of torch.cdist for Euclidean distances, with the numbers that its kernel takes.
COMPUTE_MODES = {
    "use_mm_for_euclid_dist_if_necessary": None,
    "use_mm_for_euclid_dist": 1,
    "donot_use_mm_for_euclid_dist": 2,
}

_missing = partial(
    register,
    kind="missing",
    routes=ROUTES,
    reason="neither the forward rule nor the second derivative is implemented",
    reference="the derivatives of |δ|ₚ; 0 at coincident points, as torch's first derivative",
)


class Differs(ElementwiseFunction):
    """1 where the input is not zero, with the derivative 0."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        """Return 1 for nonzero elements and 0 otherwise, in the dtype of x."""
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
        or compute_mode not in COMPUTE_MODES
    ):
        return INVALID
    if p == 2 and x1.shape[-1] and not torch.compiler.is_compiling():
        own = x1 is x2
        batch = torch.broadcast_shapes(x1.shape[:-2], x2.shape[:-2])
        x1, x2 = (each.expand(*batch, *each.shape[-2:]) for each in (x1, x2))
        mode = COMPUTE_MODES[compute_mode]
        lengths = EuclideanDistances.call(x1, x2, mode)

        def zeros() -> Tensor:
            """Mask of the distances that are 0, but those of points from themselves, which are constants."""
            zero = lengths.detach() == 0
            return zero & ~torch.eye(x1.shape[-2], dtype=torch.bool, device=zero.device) if own else zero

        return remembered(lengths, lambda: SquaredDistances.call(x1, x2, mode), held=(x1, x2), zeros=zeros)
    return _length(x1.unsqueeze(-2) - x2.unsqueeze(-3), p)


@_missing(torch.pdist, F.pdist)
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
    if p == 1 or not difference.shape[-1]:
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
