"""Functions that mix elements along a dimension by constants, for which slots must be the same along it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from hodiff.taylor.jets import Jet, is_plain_tensor, new_jet
from hodiff.taylor.sparsity.factors import Factor, Total
from hodiff.taylor.sparsity.moving_directions import levelled
from hodiff.taylor.sparsity.slots import Call, placed


def along(call: Call, jet: Jet, dims: tuple[int, ...]) -> Any:
    """Run the rule on slots that are the same along dimensions of the jet, counted from 0."""
    found = levelled(jet.support, dims) if call.sparse and len(call.jets) == 1 else None
    if found is None:
        return NotImplemented
    level, places = found
    inner = call.inner_frame(level.slots)
    return call.run(inner, [placed(jet, inner, places)], level)


def linear(call: Call) -> Any:
    """Linear layer with constant weights."""
    args, kwargs = call.arguments
    x, weight = args[0] if args else None, args[1] if len(args) > 1 else kwargs.get("weight")
    if not (isinstance(x, Jet) and is_plain_tensor(weight) and weight.ndim == 2 and x.value.ndim > 1):
        return NotImplemented
    bias = args[2] if len(args) > 2 else kwargs.get("bias")
    return _mixed(call, x, weight.mT, -1, lambda value: functional.linear(value, weight, bias))


def cumulative(call: Call) -> Any:
    """Cumulative sum along one dimension."""
    args, kwargs = call.arguments
    dim = args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis"))
    x = args[0] if args else None
    if not isinstance(x, Jet) or not isinstance(dim, int) or x.value.ndim == 0:
        return NotImplemented
    return along(call, x, (dim % x.value.ndim,))


def times_constant(call: Call, a: Any, b: Any) -> Any:
    """Matrix product with a constant, of two matrices or batches of matrices."""
    if min(a.ndim, b.ndim) < 2:
        left, right = (a.unsqueeze(0) if a.ndim == 1 else a), (b.unsqueeze(1) if b.ndim == 1 else b)
        found = torch.matmul(left, right)
        found = found.squeeze(-1) if b.ndim == 1 else found
        return found.squeeze(-1 if b.ndim == 1 else -2) if a.ndim == 1 else found
    jet, other, axis = (a, b, -1) if isinstance(a, Jet) and a in call.jets else (b, a, -2)
    if jet.value.ndim < other.ndim:
        return NotImplemented
    return _mixed(call, jet, other, axis, lambda value: value @ other if axis == -1 else other @ value)


def _mixed(call: Call, jet: Jet, other: Any, axis: int, function: Callable[[Any], Any]) -> Any:
    """Mix elements along axis -1 by columns of `other`, or -2 by its rows; `function` computes the value."""
    found = along(call, jet, (jet.value.ndim + axis,))
    if found is not NotImplemented or not call.sparse or len(call.jets) != 1:
        return found
    # Results that depend on all directions are written directly, without products with zeros.
    value, first, second = jet.in_slots()
    total = Total()
    factor = Factor(first, jet.support, other.reshape(*[1] * (value.ndim - other.ndim), *other.shape), axis)
    factor.add_to(total)
    return new_jet(call.frame, [function(value), total.held, None if second is None else factor.times(second)])
