"""Operators whose result at an element depends on its arguments at that element alone."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor

from hodiff.sparse.detection.call import Call, numbers_of
from hodiff.sparse.detection.memory import has_derivatives
from hodiff.sparse.detection.registry import rule
from hodiff.sparse.detection.supports import Supports

# Those that torch does not call pointwise, as they draw numbers, return several results or are parts of gradients.
_UNTAGGED = (
    "conj_physical",
    "prelu_kernel",
    "prelu_kernel_backward",
    "to_copy",
    "complex",
    "copysign",
    "elu_backward",
    "frexp",
    "hardswish_backward",
    "lift_fresh_copy",
    "log_sigmoid_backward",
    "log_sigmoid_forward",
    "logit_backward",
    "mish_backward",
    "native_dropout",
    "nextafter",
    "polar",
    "rrelu_with_noise",
    "softplus_backward",
    "special_xlog1py",
    "special_zeta",
    # What decompositions are made of.
    "prims::add",
    "prims::convert_element_type",
    "prims::div",
    "prims::mul",
    "prims::sub",
)

# Gradients of functions made of straight pieces: the argument only chooses the piece.
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

# Constant between jumps.
_STEPS = (
    "ceil",
    "empty_like",
    "floor",
    "floor_divide",
    "full_like",
    "heaviside",
    "is_all_true",
    "is_any_true",
    "new_empty",
    "new_empty_strided",
    "new_full",
    "new_ones",
    "new_zeros",
    "ones_like",
    "rand_like",
    "randint_like",
    "randn_like",
    "round",
    "searchsorted",
    "sign",
    "trunc",
    "zero",
    "zeros_like",
    "bernoulli",
)


def united(call: Call, arguments: Iterable[Any]) -> list[Supports | None]:
    """Every output has the union of arguments at its element."""
    union = reduce(or_, (call.supports(each) for each in arguments), call.none(()))
    return [union.broadcast(each.shape) for each in call.outputs]


@rule(*_UNTAGGED)
def elementwise(call: Call) -> list[Supports | None]:
    """The union of all arguments."""
    own = [x for name, x in call.arguments.items() if isinstance(x, Tensor) and name not in _NOT_OPERANDS]
    # What is written over is no operand of a copy.
    return united(call, own)


# What an operator draws, stores for its gradient, or writes over without reading.
_NOT_OPERANDS = {"noise", "out", "buffer"}


@rule(*_OF_PIECES)
def of_pieces(call: Call) -> list[Supports | None]:
    """The incoming gradient, where the piece has a slope at the point."""
    found = united(call, [call.get("grad_output", call.get("grad_out"))])
    if call.at_point:
        return [each.only(numbers_of(x != 0)) for each, x in zip(found, call.outputs, strict=True) if each is not None]
    return found


@rule(*_STEPS)
def steps(call: Call) -> list[Supports | None]:
    """No derivative."""
    return [None] * len(call.outputs)


@rule("copy")
def copy(call: Call) -> list[Supports | None]:
    """What is written over is not read."""
    return united(call, [call["src"]])


@rule("fill")
def fill(call: Call) -> list[Supports | None]:
    """One value everywhere."""
    return united(call, [call["value"]])


@rule("mul")
def mul(call: Call) -> list[Supports | None]:
    """A factor of zero hides the other, where it is a mask or an integer that is fixed, or at a point."""
    factors = [call["self"], call["other"]]
    union, shape = call.none(()), call.outputs[0].shape
    for mine, other in (factors, factors[::-1]):
        supports = call.supports(mine).broadcast(shape)
        if _hides(call, other) and not supports.is_empty:
            supports = supports.only(numbers_of(torch.as_tensor(other).ne(0).broadcast_to(shape)))
        union = union | supports
    return [union.broadcast(shape)]


def _hides(call: Call, factor: Any) -> bool:
    """Whether zeros of a factor hold wherever the pattern does, and are still what was multiplied by."""
    if isinstance(factor, Tensor) and not has_derivatives(factor):
        return call.is_fixed(factor)
    return call.at_point and not call.in_place


@rule("where")
def where(call: Call) -> list[Supports | None]:
    """A fixed condition chooses."""
    condition, shape = call["condition"], call.outputs[0].shape
    chosen, other = call.supports(call["self"]).broadcast(shape), call.supports(call["other"]).broadcast(shape)
    if call.is_fixed(condition):
        holds = numbers_of(condition.broadcast_to(shape))
        chosen, other = chosen.only(holds), other.only(~holds)
    return [chosen | other]


@rule("masked_fill")
def masked_fill(call: Call) -> list[Supports | None]:
    """A fixed mask hides."""
    mask, shape = call["mask"], call.outputs[0].shape
    kept, filled = call.supports(call["self"]).broadcast(shape), call.supports(call["value"]).broadcast(shape)
    if call.is_fixed(mask):
        hidden = numbers_of(mask.broadcast_to(shape))
        kept, filled = kept.only(~hidden), filled.only(hidden)
    return [kept | filled]


@rule("maximum", "minimum", "fmax", "fmin")
def extremes(call: Call) -> list[Supports | None]:
    """At a point, the one that is chosen, both where they tie."""
    a, b = call["self"], call["other"]
    if not call.at_point or call.in_place:
        return united(call, [a, b])
    shape, result = call.outputs[0].shape, call.outputs[0]
    chosen = [call.supports(x).broadcast(shape).only(numbers_of((x == result).broadcast_to(shape))) for x in (a, b)]
    return [chosen[0] | chosen[1]]


@rule("relu", "clamp", "clamp_min", "clamp_max", "hardtanh", "threshold", "hardshrink", "softshrink", "hardsigmoid")
def clamped(call: Call) -> list[Supports | None]:
    """At a point, what is cut off depends on the bound alone."""
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
    return supports.only(numbers_of((x == result).broadcast_to(result.shape)))
