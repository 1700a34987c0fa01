"""All mixed derivatives of an order as a symmetric tensor."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import combinations_with_replacement
from operator import index
from typing import Any

import torch
from torch import Tensor

from hodiff.common.options import require_int
from hodiff.common.trees import PyTree, unflatten
from hodiff.derivatives.bound_function import leave_inference_mode
from hodiff.errors import InputError
from hodiff.taylor.differential.operand import bound, require_options
from hodiff.taylor.differential.polarization import Plan, combined, directions, interpolated, planned
from hodiff.taylor.jets import tensor_of
from hodiff.torch_internals.compilers.dynamo import at_trace_time


def derivative_tensor(
    f: Callable[..., Any],
    order: int,
    argnums: int = 0,
    *,
    chunk_size: int | None = None,
    correct: bool = True,
) -> Callable[..., PyTree]:
    r"""Function that computes all mixed derivatives of an order, by one forward pass along integer directions.

    $$ T_{i_1 \dots i_d} = \frac{\partial^d f}{\partial x_{i_1} \cdots \partial x_{i_d}} $$

    A symmetric tensor over n coordinates has $\binom{n+d-1}{d}$ different entries; as many series of one variable go
    through `f`, and entries are combinations of them with exact rational factors. No derivative is nested. Rounding
    errors grow with the order, in float64 to about 1e-13 of the largest entries at order 6.

    Args:
        f: As in `hodiff.laplacian`.
        order: d, 1 or more.
        argnums: Which positional argument to differentiate: a real tensor.
        chunk_size: How many directions go through `f` at once, which bounds memory; None for all.
        correct: As in `hodiff.hvp`.

    Returns:
        Function of the arguments of `f` that returns the tensor in the structure of what `f` returns, for each output
        of the shape `(*out, *arg, ..., *arg)`, d times that of the argument.

    Raises:
        InputError: If an option is unknown, or the argument is not a real tensor.

    Example:
        >>> import torch, hodiff
        >>> third = hodiff.taylor.derivative_tensor(lambda x: x[0] ** 2 * x[1], 3)(torch.tensor([1.0, 2.0]))
        >>> third[0, 0, 1], third[1, 0, 0], third[1, 1, 1]
        (tensor(2.), tensor(2.), tensor(0.))

    Source: A. Griewank, J. Utke & A. Walther, "Evaluating higher derivative tensors by forward propagation of
    univariate Taylor series", Math. Comp. 69, 2000.
    """
    require_options("derivative_tensor", f, argnums, chunk_size, correct=correct)
    require_int("derivative_tensor", "order", order, 1)

    @leave_inference_mode
    def transformed(*args: Any, **kwargs: Any) -> PyTree:
        operand = bound("derivative_tensor", f, args, kwargs, argnums, correct=correct)
        if len(operand.leaves) != 1:
            raise InputError(
                f"derivative_tensor: argument {argnums}: expected one tensor, got a pytree of {len(operand.leaves)}; "
                "concatenate them by torch.cat, and split them inside f."
            )
        shape, size = operand.shapes[0], operand.size
        # With `index`, dynamo makes one graph for each size, because the plan is a constant of the graph.
        plan = _plan(index(size), order)
        found, structure = operand.along_each(directions(operand, plan, range(size), chunk_size), order, scaled=False)
        places = _places(size, order, tensor_of(operand.leaves[0]).device)
        whole = [_spread(combined(plan.terms, each), places, shape * order) for each in found]
        return unflatten(whole, structure)

    return transformed


@at_trace_time
def _plan(size: int, order: int) -> Plan:
    """Plan for all derivatives of an order, with coordinates in nondecreasing order."""
    return _cached_plan(size, order)


# Dynamo bypasses the cache of a function, so the function above is the one that it calls.
@lru_cache(maxsize=8)
def _cached_plan(size: int, order: int) -> Plan:
    return planned(list(combinations_with_replacement(range(size), order)), interpolated)


def _places(size: int, order: int, device: torch.device) -> Tensor:
    """Number of the derivative at each entry of the tensor, among derivatives by nondecreasing coordinates."""
    # A graph supports no torch.combinations, whose size dynamo does not know.
    entries = torch.cartesian_prod(*[torch.arange(size, device=device)] * order).reshape(-1, order)
    rising = entries.sort(-1).values
    numbers = (entries == rising).all(-1).cumsum(0) - 1
    digits = size ** torch.arange(order - 1, -1, -1, device=device)
    return numbers[(rising * digits).sum(-1)]


def _spread(distinct: Any, places: Tensor, shape: tuple[int, ...]) -> Any:
    """Arrange distinct derivatives as the tensor, whose dimensions follow the output's."""
    entries = torch.index_select(distinct, 0, places).movedim(0, -1)
    return entries.reshape((*entries.shape[:-1], *shape))
