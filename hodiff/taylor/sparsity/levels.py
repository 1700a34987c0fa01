"""Functions that mix elements along a dimension by constants: their slots have to be the same along it."""

from __future__ import annotations

from typing import Any

import torch

from hodiff.taylor.jets import Jet
from hodiff.taylor.sparsity.slots import Call, placed
from hodiff.taylor.sparsity.supports import levelled


def along(call: Call, jet: Jet, dims: tuple[int, ...]) -> Any:
    """The rule on slots that are the same along dimensions of the jet, from 0."""
    found = levelled(jet.support, dims) if call.sparse and len(call.jets) == 1 else None
    if found is None:
        return NotImplemented
    level, places = found
    inner = call.inner_frame(level.slots)
    return call.run(inner, [placed(jet, inner, places)], level)


def linear(call: Call) -> Any:
    """A layer whose weights are constant."""
    (x, *_), _ = call.arguments
    return along(call, x, (x.value.ndim - 1,)) if isinstance(x, Jet) else NotImplemented


def cumulative(call: Call) -> Any:
    """Sums along one dimension."""
    args, kwargs = call.arguments
    dim = args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis"))
    x = args[0] if args else None
    if not isinstance(x, Jet) or not isinstance(dim, int) or x.value.ndim == 0:
        return NotImplemented
    return along(call, x, (dim % x.value.ndim,))


def times_constant(call: Call, a: Any, b: Any) -> Any:
    """The matrix product with a constant."""
    if isinstance(a, Jet) and a in call.jets:
        small = isinstance(b, torch.Tensor) and b.ndim <= 2
        return along(call, a, (a.value.ndim - 1,)) if small or a.value.ndim >= b.ndim else NotImplemented
    rows = b.value.ndim - 1 if b.value.ndim == 1 else b.value.ndim - 2
    return along(call, b, (rows,)) if b.value.ndim >= a.ndim else NotImplemented
