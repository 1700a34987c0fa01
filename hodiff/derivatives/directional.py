"""Directional derivatives to any order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hodiff.common.options import require_int
from hodiff.common.ordinary import ordinary_tree
from hodiff.common.trees import PyTree, tensors_in
from hodiff.derivatives.bound_function import at_the_boundary, bind
from hodiff.derivatives.products_by_route import Leaves
from hodiff.derivatives.route_choice import follow
from hodiff.derivatives.transforms import push


@at_the_boundary
def directional_derivatives(
    f: Callable[..., Any], x: PyTree, v: PyTree, *args: Any, order: int, correct: bool = True
) -> tuple[PyTree, ...]:
    r"""Value and directional derivatives of a function up to an order, by nested forward mode.

    $$ \left(f(x),\ Df(x)[v],\ D^2 f(x)[v, v],\ \dots,\ D^k f(x)[v, \dots, v]\right), \qquad
       D^j f(x)[v, \dots, v] = \left.\frac{d^j}{dt^j} f(x + t v)\right|_{t=0} $$

    With `correct=False` it is as right as torch's forward rules: those of `layer_norm`, `batch_norm`, `solve`, `det`
    and others are constants to a second derivative, so entries from the second on are wrong there.

    Args:
        f: Function `f(x, *args)` that returns a tensor or a pytree of tensors.
        x: Where to differentiate: a tensor or a pytree of tensors, real and floating-point.
        v: The direction, with the structure, shapes, dtypes and devices of `x`.
        *args: Further arguments of `f`, taken as constants.
        order: The highest order k, 0 or more. Time and memory grow as 2^k.
        correct: As in `hodiff.hvp`.

    Returns:
        Tuple of k + 1 entries, each in the structure of what `f` returns; zeros where `f` does not depend on `x`.

    Raises:
        InputError: If `order` is no non-negative int, a leaf of `x` cannot be differentiated, or `v` does not match.
        RouteError: If torch has no forward rule for an operator in `f`.

    Example:
        >>> import torch, hodiff
        >>> x, v = torch.tensor(2.0), torch.tensor(1.0)
        >>> hodiff.directional_derivatives(lambda x: x**3, x, v, order=3)
        (tensor(8.), tensor(12.), tensor(12.), tensor(6.))

    Source: A. Griewank & A. Walther, *Evaluating Derivatives*, 2nd ed., chapter 13.
    """
    require_int("directional_derivatives", "order", order, 0)
    function = bind("directional_derivatives", f, (x, *args), name="x", correct=correct, complex_too=True)
    tangents = function.tangents(v)

    def tower(height: int) -> Callable[[Leaves], tuple[tuple[PyTree, ...], PyTree]]:
        """Value and derivatives up to an order, as a function that the next order differentiates."""
        if height == 0:
            return lambda leaves: ((function(leaves)[0],), ())

        def taller(leaves: Leaves) -> tuple[tuple[PyTree, ...], PyTree]:
            directions = _moving(tangents, leaves) if torch.compiler.is_compiling() else tangents
            values, slopes, _ = push(tower(height - 1), (leaves,), (directions,))
            return (*values, slopes[-1]), ()

        return taller

    found = follow("forward", "directional_derivatives", lambda _: tower(order)(function.leaves)[0])
    # The value may be any tensor that f knows.
    return ordinary_tree(found, (*tensors_in(found[0]), *function.leaves, *tangents))


def _moving(tangents: Leaves, leaves: Leaves) -> Leaves:
    """The tangents with derivatives of zero by the leaves, where torch would make zeros of its own."""
    # Those have no memory, and a third forward pass that is traced writes into them: "more than one element of the
    # written-to tensor refers to a single memory location".
    pairs = zip(leaves, tangents, strict=True)
    return tuple(torch.where(torch.zeros_like(x, dtype=torch.bool), x, v) for x, v in pairs)
