"""Rules for functions with a kink, where torch's reverse and forward mode have different slopes."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from hodiff.corrections.mechanism.declining import INVALID, UNNEEDED
from hodiff.corrections.mechanism.in_place_variants import in_place
from hodiff.corrections.mechanism.registry import register
from hodiff.corrections.rules.distances.absolute import is_remembered
from hodiff.corrections.rules.distances.lengths import remembered
from hodiff.routes import ROUTES
from hodiff.torch_operators.table import forms_of

_clamped = partial(
    register,
    routes=ROUTES,
    reason="with respect to tensor bounds, forward and reverse mode differ at ties; if both bounds are equal, neither "
    "has a gradient",
    reference="at a tie the input gets the gradient, then the lower bound",
    mended="2.14",
)


@_clamped(*forms_of("clamp"))
def _clamp(input: Tensor, min: Any = None, max: Any = None) -> Any:
    bounds = [each for each in (min, max) if each is not None]
    if not any(isinstance(each, Tensor) for each in bounds):
        return UNNEEDED
    if not all(isinstance(each, (Tensor, int, float)) for each in bounds):
        return INVALID
    # Torch's bounds are both tensors or both numbers, except that a positional number becomes a tensor.
    min, max = (
        torch.tensor(each, device=input.device) if isinstance(each, (int, float)) else each for each in (min, max)
    )
    # Comparisons with NaN are false, so NaN is tested separately: it wins in either argument.
    if min is not None:
        input = torch.where((input < min) | (min != min), min, input)
    return input if max is None else torch.where((input > max) | (max != max), max, input)


@_clamped(*forms_of("clamp_min"))
def _clamp_min(input: Tensor, min: Any) -> Any:
    return _clamp(input, min=min)


@_clamped(*forms_of("clamp_max"))
def _clamp_max(input: Tensor, max: Any) -> Any:
    return _clamp(input, max=max)


_clamped(*forms_of("clamp_"), name="torch.Tensor.clamp_")(in_place(_clamp))
_clamped(torch.clamp_min_, Tensor.clamp_min_)(in_place(_clamp_min))
_clamped(torch.clamp_max_, Tensor.clamp_max_)(in_place(_clamp_max))


@register(
    *forms_of("fmax"),
    routes=ROUTES[1:],
    reason="at a tie, reverse mode selects the first argument, and forward mode the second",
    reference="at a tie the first argument gets the gradient",
    mended="2.14",
)
def _fmax(input: Tensor, other: Tensor) -> Tensor:
    return torch.where((input >= other) | (other != other), input, other)


_copysign_is_wrong = partial(
    register,
    routes=ROUTES,
    reason="second derivatives at 0 are not finite, and forward mode ignores the tensor that gives the sign",
    reference="|x| and a constant sign",
)


@_copysign_is_wrong(*forms_of("copysign"))
def _copysign(input: Tensor, other: Any) -> Any:
    if not input.is_floating_point():
        return UNNEEDED
    # Integers and booleans have no sign of zero, and would promote a number to another dtype.
    if not (isinstance(other, Tensor) and other.is_floating_point()):
        other = torch.as_tensor(other, dtype=input.dtype, device=input.device)
    # `sign`, whose derivative is zero, keeps `other` in the graph. For zeros and NaN, `copysign` gives the sign.
    sign = torch.where(other.abs() > 0, other.sign(), torch.copysign(torch.ones_like(other), other.detach()))
    value = input.abs() * sign
    if not is_remembered(input):
        return value
    return remembered(value, lambda: input.square(), (input,), kind="absolute")


_copysign_is_wrong(Tensor.copysign_)(in_place(_copysign))
