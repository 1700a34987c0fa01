"""Derivatives along a line, to any order."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hodiff.common.module_state import at_another_point
from hodiff.common.options import require_int
from hodiff.common.ordinary import ordinary_tree
from hodiff.common.randomness import RandomState
from hodiff.common.trees import PyTree, flatten, overrides_functions, tensors_in, unflatten
from hodiff.corrections.rules.autograd.checkpoints import uncorrected
from hodiff.derivatives.bound_function import bind, leave_inference_mode
from hodiff.derivatives.origin import raised_by_user
from hodiff.derivatives.products_by_route import Leaves, push
from hodiff.derivatives.route_choice import follow
from hodiff.errors import HodiffError, InputError, RouteError
from hodiff.taylor.fallback import LostTangentsError
from hodiff.taylor.jets import Jet, new_jet, tensor_of
from hodiff.taylor.passes import framed, through
from hodiff.taylor.series import HIGHEST, Coefficient


def nested_directional_derivatives(
    f: Callable[..., Any], x: PyTree, v: PyTree, *args: Any, order: int, correct: bool = True
) -> tuple[PyTree, ...]:
    """Compute `hodiff.directional_derivatives` by nested forward mode: 2^k in time and memory, but for any function."""
    function = bind("directional_derivatives", f, (x, *args), name="x", correct=correct, complex_too=True)
    tangents = function.tangents(v)

    def tower(height: int) -> Callable[[Leaves], tuple[tuple[PyTree, ...], PyTree]]:
        """Return the value and derivatives up to an order, as a function that the next order differentiates."""
        if height == 0:
            return lambda leaves: ((function(leaves)[0],), ())

        def taller(leaves: Leaves) -> tuple[tuple[PyTree, ...], PyTree]:
            directions = _moving(tangents, leaves) if torch.compiler.is_compiling() else tangents
            values, slopes, _ = push(tower(height - 1), (leaves,), (directions,))
            return (*values, slopes[-1]), ()

        return taller

    found = follow("forward", "directional_derivatives", lambda _: tower(order)(function.leaves)[0])
    # The value may be any tensor that f reads.
    return ordinary_tree(found, (*tensors_in(found[0]), *function.leaves, *tangents))


def _moving(tangents: Leaves, leaves: Leaves) -> Leaves:
    """Return the tangents with zero derivatives with respect to the leaves, where torch would make its own zeros."""
    # Torch's zeros have no memory, and a traced third forward pass writes into them: "more than one element of the
    # written-to tensor refers to a single memory location".
    pairs = zip(leaves, tangents, strict=True)
    return tuple(torch.where(torch.zeros_like(x, dtype=torch.bool), x, v) for x, v in pairs)


@leave_inference_mode
def directional_derivatives(
    f: Callable[..., Any], x: PyTree, v: PyTree, *args: Any, order: int, correct: bool = True
) -> tuple[PyTree, ...]:
    r"""Value and directional derivatives of a function up to an order, by one pass over a power series.

    $$ \left(f(x),\ Df(x)[v],\ D^2 f(x)[v, v],\ \dots,\ D^k f(x)[v, \dots, v]\right), \qquad
       D^j f(x)[v, \dots, v] = \left.\frac{d^j}{dt^j} f(x + t v)\right|_{t=0} $$

    Time and memory grow as k² at most (`hodiff.taylor`). Compiled code, and functions that Taylor mode
    refuses, fall back to nested forward mode, which takes 2^k and gives the same result.

    With `correct=False`, functions without a rule in Taylor mode use torch's forward rules. Some of these rules are
    constant for a second derivative, so entries from the second on are wrong there.

    Args:
        f: Function `f(x, *args)` that returns a tensor or a pytree of tensors.
        x: Where to differentiate: a tensor or a pytree of tensors, real and floating-point.
        v: The direction, with the structure, shapes, dtypes and devices of `x`.
        *args: Further arguments of `f`, taken as constants.
        order: The highest order k, 0 or more.
        correct: As in `hodiff.hvp`.

    Returns:
        Tuple of k + 1 entries, each in the structure of what `f` returns; zeros where `f` does not depend on `x`.

    Raises:
        InputError: If `order` is no non-negative int, a leaf of `x` cannot be differentiated, or `v` does not match.
        RouteError: If neither torch's forward mode nor Taylor mode has a rule for an operator in `f`.

    Example:
        >>> import torch, hodiff
        >>> x, v = torch.tensor(2.0), torch.tensor(1.0)
        >>> hodiff.directional_derivatives(lambda x: x**3, x, v, order=3)
        (tensor(8.), tensor(12.), tensor(12.), tensor(6.))

    Source: A. Griewank & A. Walther, *Evaluating Derivatives*, 2nd ed., chapter 13.
    """
    require_int("directional_derivatives", "order", order, 0)
    if order > HIGHEST:
        raise InputError(
            f"directional_derivatives: order: expected at most {HIGHEST}, as larger factorials are no floating-point "
            f"numbers, got {order}; hodiff.taylor.jet(..., normalized=True) gives Taylor coefficients of any order."
        )
    (leaves, spec), (directions, structure) = flatten(x), flatten(v)
    function = bind(
        "directional_derivatives",
        f,
        (unflatten([tensor_of(each) for each in leaves], spec), *args),
        name="x",
        correct=correct,
        complex_too=True,
    )
    function.tangents(unflatten([tensor_of(each) for each in directions], structure))
    inside = any(isinstance(each, Jet) for each in (*leaves, *directions))
    own = any(isinstance(each, Tensor) and overrides_functions(each) for each in leaves)
    nested = partial(nested_directional_derivatives, f, x, v, *args, order=order, correct=correct)
    # A compiler traces Taylor mode only in part, and jets do not support tensor subclasses.
    if not inside and (torch.compiler.is_compiling() or own):
        return nested()
    state = RandomState(each for each in leaves if isinstance(each, Tensor))
    by_torch: RouteError | None = None
    if not inside and order < 2:
        # One pass of torch's forward mode gives a first derivative, but it lacks rules for some functions.
        try:
            return nested()
        except RouteError as error:
            by_torch = error
        state.rewind()
    try:
        found = _by_series(f, leaves, spec, directions, function.args[1:], order, correct)
    except Exception as error:
        if by_torch is not None:
            raise RouteError(_both(by_torch, error)) from by_torch
        # Nested forward mode would lose the tangents silently.
        if inside or isinstance(error, LostTangentsError) or raised_by_user(error):
            raise
        # If nested forward mode fails too, it raises its own error.
        state.rewind()
        try:
            return nested()
        except RouteError as other:
            raise RouteError(_both(other, error)) from other
    return ordinary_tree(found, (*tensors_in(found[0]), *tensors_in((x, v))))


def _by_series(
    f: Callable[..., Any],
    leaves: list[Any],
    spec: pytree.TreeSpec,
    directions: list[Any],
    args: tuple[Any, ...],
    order: int,
    correct: bool,
) -> tuple[PyTree, ...]:
    @at_another_point
    def function(point: PyTree) -> Any:
        if correct:
            return f(point, *args)
        with uncorrected():
            return f(point, *args)

    with framed(order, correct=correct) as frame:
        rest: list[Coefficient] = [None] * (order - 1)
        jets = [new_jet(frame, [leaf, v, *rest][: order + 1]) for leaf, v in zip(leaves, directions, strict=True)]
        found, structure = through(frame, function, (unflatten(jets, spec),))
    return tuple(unflatten([_derivative(each, k) for each in found], structure) for k in range(order + 1))


def _both(by_torch: RouteError, by_series: Exception) -> str:
    """Join the messages of nested forward mode and, where hodiff raised it, of Taylor mode."""
    if not isinstance(by_series, HodiffError):
        return str(by_torch)
    return f"{by_torch}\n  Taylor mode: {str(by_series).removeprefix('jet: ')}"


def _derivative(coefficients: list[Coefficient], k: int) -> Any:
    found = coefficients[k]
    if found is None:
        return torch.zeros_like(coefficients[0])
    return found if k < 2 else found * float(math.factorial(k))
