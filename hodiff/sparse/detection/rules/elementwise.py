"""Rules for elementwise operators, and for operators that move elements, by moving the numbers of the elements."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from operator import or_
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from hodiff.sparse.detection.call import Call, numbers_of, rule
from hodiff.sparse.detection.memory_supports import has_derivatives
from hodiff.sparse.detection.rules.sums import along_dimension
from hodiff.sparse.detection.supports import Supports, joined

# Gradients of piecewise linear functions: the argument only selects the piece.
_OF_PIECES = (
    "hardshrink_backward",
    "hardsigmoid_backward",
    "hardtanh_backward",
    "leaky_relu_backward",
    "native_dropout_backward",
    "rrelu_with_noise_backward",
    "softshrink_backward",
    "threshold_backward",
)


def united(call: Call, arguments: Iterable[Any]) -> list[Supports | None]:
    """Union of the arguments at each element, for every output."""
    union = reduce(or_, (call.supports(each) for each in arguments), call.none(()))
    return [union.broadcast(each.shape) for each in call.outputs]


# Building blocks of decompositions.
@rule("prims::add", "prims::convert_element_type", "prims::div", "prims::mul", "prims::sub")
def elementwise(call: Call) -> list[Supports | None]:
    """Union of all operands."""
    own = [x for name, x in call.arguments.items() if isinstance(x, Tensor) and name not in _NOT_OPERANDS]
    # A buffer that is overwritten is not an operand.
    return united(call, own)


# Arguments that an operator draws, stores for its gradient, or overwrites without reading.
_NOT_OPERANDS = {"noise", "out", "buffer"}


@rule(*_OF_PIECES)
def of_pieces(call: Call) -> list[Supports | None]:
    """Incoming gradient; at a point, only where the piece has a slope."""
    found = united(call, [call.get("grad_output", call.get("grad_out"))])
    if call.at_point:
        return [each.only(numbers_of(x != 0)) for each, x in zip(found, call.outputs, strict=True) if each is not None]
    return found


def steps(call: Call) -> list[Supports | None]:
    """None for each output, which has no derivative."""
    return [None] * len(call.outputs)


@rule("copy")
def copy(call: Call) -> list[Supports | None]:
    """Supports of the source; values that are overwritten are not read."""
    return united(call, [call["src"]])


@rule("fill")
def fill(call: Call) -> list[Supports | None]:
    """Supports of one value, at every element."""
    return united(call, [call["value"]])


@rule("mul")
def mul(call: Call) -> list[Supports | None]:
    """Union of the factors; zeros of a fixed mask or integer, or at a point, hide the other factor."""
    factors = [call["self"], call["other"]]
    union, shape = call.none(()), call.outputs[0].shape
    for mine, other in (factors, factors[::-1]):
        supports = call.supports(mine).broadcast(shape)
        if _hides(call, other) and not supports.is_empty:
            supports = supports.only(numbers_of(torch.as_tensor(other).ne(0).broadcast_to(shape)))
        union = union | supports
    return [union.broadcast(shape)]


def _hides(call: Call, factor: Any) -> bool:
    """Whether zeros of a factor hold wherever the pattern does, and were not overwritten."""
    if isinstance(factor, Tensor) and not has_derivatives(factor):
        return call.is_fixed(factor)
    return call.at_point and not call.in_place


@rule("where")
def where(call: Call) -> list[Supports | None]:
    """Union of both arguments, or the argument that a fixed condition selects."""
    condition, shape = call["condition"], call.outputs[0].shape
    chosen, other = call.supports(call["self"]).broadcast(shape), call.supports(call["other"]).broadcast(shape)
    if call.is_fixed(condition):
        holds = numbers_of(condition.broadcast_to(shape))
        chosen, other = chosen.only(holds), other.only(~holds)
    return [chosen | other]


@rule("masked_fill")
def masked_fill(call: Call) -> list[Supports | None]:
    """Union of tensor and value, or the one that a fixed mask selects."""
    mask, shape = call["mask"], call.outputs[0].shape
    kept, filled = call.supports(call["self"]).broadcast(shape), call.supports(call["value"]).broadcast(shape)
    if call.is_fixed(mask):
        hidden = numbers_of(mask.broadcast_to(shape))
        kept, filled = kept.only(~hidden), filled.only(hidden)
    return [kept | filled]


@rule("maximum", "minimum", "fmax", "fmin")
def extremes(call: Call) -> list[Supports | None]:
    """Union of both arguments; at a point, the argument that is chosen, or both at a tie."""
    a, b = call["self"], call["other"]
    if not call.at_point or call.in_place:
        return united(call, [a, b])
    shape, result = call.outputs[0].shape, call.outputs[0]
    chosen = [call.supports(x).broadcast(shape).only(numbers_of((x == result).broadcast_to(shape))) for x in (a, b)]
    return [chosen[0] | chosen[1]]


@rule(
    "relu",
    "clamp",
    "clamp_min",
    "clamp_max",
    "hardtanh",
    "threshold",
    "hardshrink",
    "softshrink",
    "hardsigmoid",
    "hardswish",
)
def clamped(call: Call) -> list[Supports | None]:
    """Union of the operands; at a point, elements that are cut off depend on the bound alone."""
    if not call.at_point or call.in_place:
        return list(elementwise(call))
    x, result = call["self"], call.outputs[0]
    bounds = united(call, [each for name, each in call.arguments.items() if name != "self"])[0]
    supports = call.supports(x).broadcast(result.shape)
    assert bounds is not None
    return [_moving_pieces(call, supports, x, result) | bounds]


def _moving_pieces(call: Call, supports: Supports, x: Tensor, result: Tensor) -> Supports:
    if call.name in {"hardsigmoid", "softshrink", "hardshrink", "threshold"}:
        return supports
    if call.name == "hardswish":
        return supports.only(numbers_of(x > -3))
    return supports.only(numbers_of((x == result).broadcast_to(result.shape)))


# A mask decides on the shape of the first two, and must not move. The last is linear too, with other arguments.
@rule("index", "masked_select", "scatter")
def moving(call: Call) -> list[Supports | None]:
    """Move numbers instead of elements: 1, 2, ... over all arguments, and 0 for constants."""
    if not all(call.is_fixed(x) for x in call.tensors if not has_derivatives(x)):
        return along_dimension(call) if call.name in _ALONG else list(call.dense())
    parts: list[Supports] = []
    start = 1

    def numbered(x: Any) -> Any:
        nonlocal start
        if not isinstance(x, Tensor):
            return x
        if not has_derivatives(x):
            return x.cpu()
        supports = call.supports(x)
        if supports.is_empty:
            return torch.zeros(x.shape, dtype=torch.float64)
        parts.append(supports)
        start += x.numel()
        return torch.arange(start - x.numel(), start, dtype=torch.float64).reshape(x.shape)

    # Numbers up to 2^53 are exact in float64, which more operators take than int64.
    arguments = {
        name: 0 if _is_constant(name, each) else tree_map(numbered, each) for name, each in call.arguments.items()
    }
    moved = call.func(**arguments)
    if not parts:
        return [None] * len(call.outputs)
    flat = joined(parts)
    which = np.append(0, flat.which)
    return [flat.take(which[each.to(torch.int64).numpy()]) for each in tree_leaves(moved)]


# Operators whose indices lie along one dimension.
_ALONG = {"gather", "index_select", "scatter"}


def _is_constant(name: str, value: Any) -> bool:
    """Whether an argument is a number to fill with, which must not be taken for an element's number."""
    return name == "value" and not isinstance(value, Tensor)


@rule("lift_fresh", "clone", "contiguous", "detach_copy", "alias_copy")
def same(call: Call) -> list[Supports | None]:
    """Supports of a copy."""
    return [call.supports(call.tensors[0])]
