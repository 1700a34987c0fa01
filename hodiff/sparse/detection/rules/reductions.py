"""Rules for operators that reduce dimensions, or mix the elements along them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import Any

import numpy as np

from hodiff.sparse.detection.call import Call, rule
from hodiff.sparse.detection.supports import Supports, TooManyError, most_entries

# Operators whose result has the shape of the arguments, where each element depends on its whole row: the name of the
# argument that gives the row's dimensions.
_ROWS = {
    "fft_c2c": "dim",
    "log_softmax": "dim",
    "log_softmax_backward_data": "dim",
    "safe_softmax": "dim",
    "softmax": "dim",
    "softmax_backward_data": "dim",
    "renorm": "dim",
    "sort": "dim",
}


def dims_of(value: Any, rank: int) -> tuple[int, ...]:
    """Return the named dimensions, or all dimensions if none is named."""
    if value is None or (isinstance(value, Sequence) and not value):
        return tuple(range(rank))
    named = value if isinstance(value, Sequence) else (value,)
    return tuple({dim % rank for dim in named}) if rank else ()


def reduced(call: Call) -> list[Supports | None]:
    """Union over the reduced dimensions."""
    x = call.tensors[0]
    supports = call.supports(x)
    # Only `dim` names dimensions, unlike the order of a norm.
    dims = dims_of(call.get("dim"), x.dim())
    united = supports.over(dims)
    return [united.reshape(*each.shape) for each in call.outputs]


@rule(*_ROWS)
def rows(call: Call) -> list[Supports | None]:
    """Union of each element's row, over all arguments."""
    named = call[_ROWS[call.name]]
    moving = [x for x in call.tensors if call.moves(x)]
    shape = call.outputs[0].shape
    union = reduce(or_, (call.supports(x).broadcast(shape) for x in moving), call.none(shape))
    if call.name == "renorm":  # every slice along the dimension has its own norm
        dims = tuple(dim for dim in range(len(shape)) if dim != named % max(len(shape), 1))
    else:
        dims = dims_of(named, len(shape))
    found = union.along(dims)
    return [found.broadcast(each.shape) for each in call.outputs]


@rule("topk", "fft_r2c", "fft_c2r", "histc")
def rows_of_another_length(call: Call) -> list[Supports | None]:
    """Union of each row of the argument, for rows of another length."""
    x = call["self"]
    dims = dims_of(call.get("dim"), x.dim())
    union = call.supports(x).over(dims, keepdim=True)
    return [union.broadcast(each.shape) for each in call.outputs]


@rule("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin")
def cumulative(call: Call) -> list[Supports | None]:
    """Union of all elements up to each element."""
    x = call["self"]
    supports = call.supports(x)
    if not x.dim():
        return [supports] * len(call.outputs)
    rows = supports.take(np.moveaxis(supports.which, call["dim"], -1))
    length = rows.shape[-1]
    if rows.which.size * length > 2 * most_entries(call.memory.inputs):
        raise TooManyError
    # Element j contributes to elements j, j + 1, ...
    source, target = np.triu_indices(length)
    flat = np.arange(rows.which.size).reshape(rows.shape)
    summed = rows.take(rows.which[..., source]).merged(flat[..., target], rows.shape)
    return [summed.take(np.moveaxis(summed.which, -1, call["dim"]))] * len(call.outputs)


@rule("trace")
def trace(call: Call) -> list[Supports | None]:
    """Union of the diagonal elements."""
    supports = call.supports(call["self"])
    return [supports.take(np.diagonal(supports.which)).whole(())]
