"""The four second-order routes, returning value, gradient and product from one evaluation of f."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from hodiff.common.trees import PyTree
from hodiff.derivatives.bound_function import BoundFunction
from hodiff.derivatives.products_by_route import Leaves, guard_forward, guard_reverse, push_unit_vectors
from hodiff.derivatives.transforms import gradient, pull, push

# Value, gradient, product and aux.
SecondOrder = tuple[Tensor, Leaves, Leaves, PyTree]


def reverse_over_reverse(f: BoundFunction, primals: Leaves, tangents: Leaves) -> SecondOrder:
    """Pull the direction back through the gradient."""
    first, pullback, (value, aux) = pull(gradient(_with_value(guard_reverse(f))), primals)
    return value, first, pullback(tuple(tangents))[0], aux


def forward_over_reverse(f: BoundFunction, primals: Leaves, tangents: Leaves) -> SecondOrder:
    """Push the direction through the gradient."""
    first, product, (value, aux) = push(gradient(_with_value(guard_reverse(f))), (primals,), (tangents,))
    return value, first, product, aux


def reverse_over_forward(f: BoundFunction, primals: Leaves, tangents: Leaves) -> SecondOrder:
    """Take the gradient of the directional derivative with respect to the point and to the direction."""

    def slope(both: tuple[Leaves, Leaves]) -> tuple[Tensor, Any]:
        point, direction = both
        value, tangent, aux = push(guard_forward(f), (point,), (direction,))
        return tangent, (value, aux)

    (product, first), (value, aux) = gradient(slope)((tuple(primals), tuple(tangents)))
    return value, first, product, aux


SECOND_ORDER: dict[str, Callable[[BoundFunction, Leaves, Leaves], SecondOrder]] = {
    "reverse-over-reverse": reverse_over_reverse,
    "forward-over-reverse": forward_over_reverse,
    "reverse-over-forward": reverse_over_forward,
    "forward-over-forward": push_unit_vectors,
}


def _with_value(f: Callable[[Leaves], tuple[Tensor, PyTree]]) -> Callable[[Leaves], tuple[Tensor, Any]]:
    """Return the function with its value as part of aux, which a transform passes on."""

    def valued(point: Leaves) -> tuple[Tensor, Any]:
        value, aux = f(point)
        return value, (value, aux)

    return valued
