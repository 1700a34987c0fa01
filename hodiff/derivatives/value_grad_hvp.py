"""Value, gradient and Hessian-vector product together, for the cost of the product."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from torch import Tensor

from hodiff.common.ordinary import ordinary
from hodiff.common.trees import PyTree
from hodiff.derivatives.bound_function import BoundFunction, at_the_boundary, bind
from hodiff.derivatives.products_by_route import (
    Leaves,
    gradient,
    guard_forward,
    guard_reverse,
    pull,
    push,
    push_unit_vectors,
)
from hodiff.derivatives.recorded_gradient import RecordedGradient
from hodiff.derivatives.route_choice import follow, require_route
from hodiff.derivatives.steady import leaving_no_trace
from hodiff.routes import ROUTES
from hodiff.torch_internals.autograd.differentiation import only_reverse_mode

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


@at_the_boundary
def value_grad_hvp(
    f: Callable[..., Any],
    x: PyTree,
    v: PyTree,
    *args: Any,
    route: str = "auto",
    has_aux: bool = False,
    correct: bool = True,
) -> tuple[Any, ...]:
    r"""Compute value, gradient and Hessian-vector product of a scalar function from one evaluation of it.

    $$ f(x), \qquad \nabla f(x), \qquad \nabla^2 f(x)\, v $$

    A Newton or trust-region step needs all three; `hodiff.hvp` computes the first two as well, but drops them.
    Results can be differentiated again and work under transforms, as for `hodiff.hvp`.

    Args:
        f: Function `f(x, *args)` that returns a tensor of shape `()`, or `(value, aux)` with `has_aux`. It is evaluated
            as by `hodiff.hvp`.
        x: Where to differentiate: a tensor or a pytree of floating-point tensors, complex ones as in `hodiff.hvp`.
        v: The direction, with the structure, shapes, dtypes and devices of `x`.
        *args: Further arguments of `f`, taken as constants.
        route: One of `hodiff.ROUTES`, or "auto", as in `hodiff.hvp`.
        has_aux: Whether `f` returns `(value, aux)`, aux a pytree of tensors.
        correct: Whether hodiff's rules replace torch's wrong and missing rules, as within `hodiff.corrected()`; if
            not, the derivatives are torch's own.

    Returns:
        The triple (value, gradient, product): value of shape `()`, gradient and product with the structure of `x`,
        zeros for a leaf that `f` ignores. With `has_aux`, (value, gradient, product, aux).

    Raises:
        InputError: If `f` does not return one real number or does not depend on `x`, if a leaf of `x` cannot be
            differentiated, if `v` does not match `x`, or if the route is unknown.
        RouteError: If torch does not implement the route, or with "auto" any route; the message has each error.

    Example:
        >>> import torch, hodiff
        >>> x, v = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 0.0])
        >>> hodiff.value_grad_hvp(lambda x: x[0] ** 2 * x[1], x, v)
        (tensor(2.), tensor([4., 1.]), tensor([4., 2.]))

    Source: B. A. Pearlmutter, "Fast exact multiplication by the Hessian", Neural Computation 6 (1994), eq. 2.4.
    """
    return _evaluate("value_grad_hvp", f, x, v, args, route, has_aux, correct)


@at_the_boundary
def grad_and_hvp(
    f: Callable[..., Any],
    x: PyTree,
    v: PyTree,
    *args: Any,
    route: str = "auto",
    has_aux: bool = False,
    correct: bool = True,
) -> tuple[Any, ...]:
    r"""Compute gradient and Hessian-vector product of a scalar function from one evaluation of it.

    $$ \nabla f(x), \qquad \nabla^2 f(x)\, v $$

    It is `hodiff.value_grad_hvp` without the value.

    Args:
        f: Function `f(x, *args)` that returns a tensor of shape `()`, or `(value, aux)` with `has_aux`.
        x: Where to differentiate: a tensor or a pytree of floating-point tensors, complex ones as in `hodiff.hvp`.
        v: The direction, with the structure, shapes, dtypes and devices of `x`.
        *args: Further arguments of `f`, taken as constants.
        route: One of `hodiff.ROUTES`, or "auto", as in `hodiff.hvp`.
        has_aux: Whether `f` returns `(value, aux)`, aux a pytree of tensors.
        correct: Whether hodiff's rules replace torch's, as in `hodiff.hvp`.

    Returns:
        The pair (gradient, product), both with the structure of `x`; with `has_aux`, (gradient, product, aux).

    Raises:
        InputError: As `hodiff.value_grad_hvp`.
        RouteError: As `hodiff.value_grad_hvp`.

    Example:
        >>> import torch, hodiff
        >>> x, v = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 0.0])
        >>> hodiff.grad_and_hvp(lambda x: x[0] ** 2 * x[1], x, v)
        (tensor([4., 1.]), tensor([4., 2.]))

    Source: B. A. Pearlmutter, "Fast exact multiplication by the Hessian", Neural Computation 6 (1994), eq. 2.4.
    """
    return _evaluate("grad_and_hvp", f, x, v, args, route, has_aux, correct)[1:]


def _evaluate(
    caller: str,
    f: Callable[..., Any],
    x: PyTree,
    v: PyTree,
    args: tuple[Any, ...],
    route: str,
    has_aux: bool,
    correct: bool,
) -> tuple[Any, ...]:
    require_route(caller, route)
    function = bind(
        caller,
        f,
        (x, *args),
        name="x",
        has_aux=has_aux,
        correct=correct,
        complex_too=True,
        jagged_too=True,
        sharded_too=True,
    )
    primals = function.leaves
    tangents = function.tangents(v)
    plain = only_reverse_mode()

    def attempt(name: str) -> SecondOrder:
        if function.sharded is not None:
            function.require_route(name)
        if plain and name == ROUTES[0]:
            recorded = RecordedGradient(function, tangents, numbers=True)
            return recorded.value, recorded.gradient, recorded.product(tangents), recorded.aux
        with leaving_no_trace(function.f) if plain else nullcontext():
            return SECOND_ORDER[name](function, primals, tangents)

    value, gradient, product, aux = follow(route, caller, attempt)
    own: tuple[Tensor, ...] = ordinary((value, *gradient, *product), (*primals, *tangents))
    n = len(primals)
    result = own[0], function.unflatten(own[1 : n + 1]), function.unflatten(own[n + 1 :])
    return (*result, aux) if has_aux else result
