r"""Euclidean distances of all pairs of rows, with derivatives of every order in the memory of the distances.

Two maps carry them, of weights $G$ (P, R) and directions $u$ (P, M),

$$ W(G)_i = \sum_j G_{ij} (x_i - y_j), \qquad I(u)_{ij} = u_i \cdot (x_i - y_j), $$

each the transpose of the other: the gradient of $d_{ij} = |x_i - y_j|$ is $W(\bar d / d)$, its derivative along $u$ is
$I(u) / d$.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hodiff.rules.any_order import AnyOrderFunction
from hodiff.rules.nesting import nestable_jvp
from hodiff.torch_internals.operators import distances, distances_gradient

# The kernel's number of the way without a matrix product, by which equal points have the distance 0.
_EXACT = 2
# Up to so many points torch takes that way by default.
_FEW = 25


class EuclideanDistances(AnyOrderFunction):
    """$d$ of all pairs. Its derivatives divide by the exact distance, whichever way its value was computed."""

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
        r"""$W(\bar d / d)$ of each side."""
        if cotangent is None:
            return None, None, None
        x, y = ctx.saved_tensors
        return _pulled(ctx, _divided(cotangent, x, y))

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, x_t: Tensor | None, y_t: Tensor | None, _: None) -> Tensor:
        """$I(u) / d$ of each side."""
        return _divided(_pushed(ctx, x_t, y_t), *ctx.saved_tensors)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, y: Tensor, mode: int | None) -> tuple[Tensor, int]:
        """The batch is one more in front."""
        x, y = _in_front(info.batch_size, in_dims, (x, y))
        return EuclideanDistances.call(x, y, mode), 0


class SquaredDistances(AnyOrderFunction):
    r"""$d^2$ of all pairs, smooth at equal points as well: by reverse mode $W(2 \bar y)$, by forward mode $2 I(u)$."""

    @staticmethod
    def forward(x: Tensor, y: Tensor, mode: int | None) -> Tensor:
        """Square the distances."""
        return distances(x, y, 2.0, mode).square()

    setup_context = EuclideanDistances.setup_context

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor | None) -> Any:
        r"""$W(2 \bar y)$ of each side."""
        return (None, None, None) if cotangent is None else _pulled(ctx, 2 * cotangent)

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, x_t: Tensor | None, y_t: Tensor | None, _: None) -> Tensor:
        """$2 I(u)$ of each side."""
        return 2 * _pushed(ctx, x_t, y_t)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, y: Tensor, mode: int | None) -> tuple[Tensor, int]:
        """The batch is one more in front."""
        x, y = _in_front(info.batch_size, in_dims, (x, y))
        return SquaredDistances.call(x, y, mode), 0


def _pulled(ctx: Any, weights: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    """The map $W$ of each side."""
    x, y = ctx.saved_tensors
    needs_x, needs_y, _ = ctx.needs_input_grad
    by = _weighted_by_products if _takes_products(ctx.mode, x, y) else WeightedDifferences.call
    return by(weights, x, y) if needs_x else None, by(weights.mT, y, x) if needs_y else None, None


def _pushed(ctx: Any, x_t: Tensor | None, y_t: Tensor | None) -> Tensor:
    """The map $I$ of each side, in sum."""
    x, y = ctx.saved_tensors
    terms = []
    if x_t is not None:
        terms.append(_projections(x_t, x, y))
    if y_t is not None:
        terms.append(_projections(y_t, y, x).mT)
    return terms[0] if len(terms) == 1 else terms[0] + terms[1]


class WeightedDifferences(AnyOrderFunction):
    """The map $W$. Its kernel, made for the gradient of distances, subtracts before it sums."""

    @staticmethod
    def forward(weights: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Sum (..., P, M) with weights (..., P, R) of the differences of x (..., P, M) and y (..., R, M)."""
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
        """The map $I$ by the weights."""
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
        """The batch is one more in front."""
        return WeightedDifferences.call(*_in_front(info.batch_size, in_dims, (weights, x, y))), 0


def _projections(u: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """The map $I$, by a matrix product. Around the centre of y it loses no digits to a common offset."""
    centre = y.detach().mean(-2, keepdim=True)
    return (u * (x - centre)).sum(-1, keepdim=True) - u @ (y - centre).mT


def _weighted_by_products(weights: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """The map $W$, by a matrix product: of many points ten times faster than the kernel."""
    centre = y.detach().mean(-2, keepdim=True)
    return weights.sum(-1, keepdim=True) * (x - centre) - weights @ (y - centre)


def _takes_products(mode: int | None, x: Tensor, y: Tensor) -> bool:
    """Whether torch computes the distances by a matrix product."""
    return mode == 1 or (mode is None and max(x.shape[-2], y.shape[-2]) > _FEW)


def _divided(numerator: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """The quotient by the distances, 0 where they are 0."""
    distances = EuclideanDistances.call(x, y, _EXACT)
    zero = distances == 0
    return torch.where(zero, 0, numerator / torch.where(zero, 1, distances))


def _in_front(size: int, in_dims: tuple[Any, ...], tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """All tensors with the batch as their first dimension."""
    return tuple(
        each.expand(size, *each.shape) if dim is None else each.movedim(dim, 0)
        for each, dim in zip(tensors, in_dims, strict=False)
    )
