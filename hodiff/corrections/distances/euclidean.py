r"""Euclidean distances of all pairs of rows, with derivatives of every order in the memory of the distances.

Two maps, of weights $G$ (P, R) and of directions $u$ (P, M), give the derivatives:

$$ W(G)_i = \sum_j G_{ij} (x_i - y_j), \qquad I(u)_{ij} = u_i \cdot (x_i - y_j), $$

The maps are transposes of each other. The gradient of $d_{ij} = |x_i - y_j|$ is $W(\bar d / d)$, its derivative along
$u$ is $I(u) / d$.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hodiff.rules.any_order import AnyOrderFunction
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

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save the inputs."""
        del output
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)
        ctx.set_materialize_grads(False)

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
    centre = y.detach().mean(-2, keepdim=True)
    return (u * (x - centre)).sum(-1, keepdim=True) - u @ (y - centre).mT


def _weighted_by_products(weights: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """The map $W$, by a matrix product; ten times faster than the kernel for many points."""
    centre = y.detach().mean(-2, keepdim=True)
    return weights.sum(-1, keepdim=True) * (x - centre) - weights @ (y - centre)


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
