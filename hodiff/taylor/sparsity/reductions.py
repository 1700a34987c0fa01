"""Sums: slots of the added elements become slots of the sum.

Functions that mix elements along a dimension by constants, for which slots must be the same along it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from hodiff.taylor.jets import Jet, is_plain_tensor, new_jet
from hodiff.taylor.sparsity.factors import Factor, Total
from hodiff.taylor.sparsity.moving import sequence
from hodiff.taylor.sparsity.moving_directions import Places, Support, levelled, support
from hodiff.taylor.sparsity.slots import Call, mapped_jet, placed


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


def total(call: Call) -> Any:
    """Sum or mean over dimensions."""
    options = _options(*call.arguments)
    if options is None or not call.sparse or len(call.jets) != 1:
        return NotImplemented
    (jet, dims, keepdim) = options
    value = jet.value
    dims = (
        tuple(range(value.ndim))
        if dims is None or dims == ()
        else tuple(sorted(d % value.ndim for d in sequence(dims)))
    )
    count = math.prod(value.shape[d] for d in dims) if call.entry.name == "mean" else 1
    found: Any = summed(jet, dims, keepdim=keepdim)
    return found if count == 1 else found / count


def _options(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Jet, Any, bool] | None:
    """Read the jet, the dimensions and keepdim from the arguments of sum."""
    named = {"axis": "dim", "self": "input"}
    given = dict(zip(("input", "dim", "keepdim"), args, strict=False))
    given.update({named.get(name, name): each for name, each in kwargs.items() if each is not None})
    if set(given) - {"input", "dim", "keepdim"} or not isinstance(given["input"], Jet):
        return None
    dims = given.get("dim")
    if isinstance(dims, (list, tuple)) and not all(isinstance(each, int) for each in dims):
        return None
    return given["input"], dims, bool(given.get("keepdim", False))


def summed(jet: Jet, dims: tuple[int, ...], *, keepdim: bool) -> Jet:
    """Sum of a jet in slots over dimensions, counted from 0; in all directions if slots would be too many."""
    given: Support = jet.support
    found = levelled(given, dims)
    if found is None:
        own, places = None, given.all_places
    else:
        level, places = found
        index = level.index if keepdim else level.index.squeeze(tuple(d + 1 for d in dims))
        own = support(index, level.directions)

    def add(each: Any) -> Any:
        return each.sum(dims, keepdim=keepdim)

    return mapped_jet(jet, own, add, lambda each: accumulated(each, places, dims, keepdim=keepdim))


def accumulated(coefficient: Any, places: Places, dims: tuple[int, ...], *, keepdim: bool) -> Any:
    """Sum over dimensions while slots move to their places, without writing all elements there first."""
    axes = tuple(d + 1 for d in dims)
    target = places.target
    # Sum first along dimensions on which places do not depend.
    early = tuple(a for a in axes if target.shape[a] == 1)
    late = tuple(a for a in axes if target.shape[a] > 1)
    if early:
        coefficient = coefficient.sum(early, keepdim=True)
    if late:
        kept = [a for a in range(1, target.ndim) if a not in late]
        flat = coefficient.permute(0, *late, *kept).flatten(0, len(late))
        found = places.rows(late)(flat)
        for a in late:
            found = found.unsqueeze(a)
    else:
        found = places(coefficient)
    return found if keepdim else found.squeeze(axes)
