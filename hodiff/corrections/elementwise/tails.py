r"""Rules for functions that approach a limit, whose derivatives torch makes of the rounded value.

$\sigma'(40) = 4 \cdot 10^{-18}$ is $y (1 - y)$ of a y that rounds to 1. Torch's own derivatives serve wherever they
keep a third of their digits, and so no route is called wrong. Asking for that is a pass over the numbers, on a
CPU alone, as others would have to wait; compilers see torch's own functions.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hodiff.corrections.declining import UNNEEDED
from hodiff.corrections.elementwise.recorded import LEAST_ELEMENTS, recorded
from hodiff.corrections.registry import register
from hodiff.corrections.values import numbers_of, with_value
from hodiff.functions.logarithms import LogSigmoid
from hodiff.functions.logistic import Logistic
from hodiff.functions.softmax.reductions import Tanh
from hodiff.torch_internals.autograd.differentiation import may_be_differentiated
from hodiff.torch_internals.autograd.wrapped_tensors import below_transforms

_loses_tails = partial(
    register, reason="derivatives are made of a value that rounds to its limit, and lose their digits in the tails"
)


# From where on a rounded $1 - e^{-x}$ leaves a third of the digits of $e^{-x}$ at most.
_FAR = {
    dtype: -2 / 3 * math.log(torch.finfo(dtype).eps)
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
}


def _far(dtype: torch.dtype) -> float:
    return _FAR.get(dtype, math.inf)


def _seen(x: Tensor) -> Tensor | None:
    """The numbers, where derivatives may be asked for and one can look at them, and without waiting."""
    if not (x.is_cpu and x.is_floating_point() and may_be_differentiated((x,))):
        return None
    return numbers_of(x)


def _range(plain: Tensor) -> tuple[float, float]:
    low, high = plain.aminmax()
    return low.item(), high.item()


def _exceed(x: Tensor, limit: float) -> bool:
    plain = _seen(x)
    return plain is not None and plain.max().item() > limit


@_loses_tails(
    torch.sigmoid,
    Tensor.sigmoid,
    torch.special.expit,
    F.sigmoid,
    name="torch.sigmoid",
    reference="$\\sigma(x) \\sigma(-x)$",
)
def _sigmoid(input: Tensor) -> Any:
    return Logistic.call(input) if _exceed(input, _far(input.dtype)) else UNNEEDED


@_loses_tails(torch.tanh, Tensor.tanh, F.tanh, name="torch.tanh", reference="$1 / \\cosh^2 x$")
def _tanh(input: Tensor) -> Any:
    plain, limit = _seen(input), _far(input.dtype) / 2
    if plain is None:
        return UNNEEDED
    low, high = _range(plain)
    return UNNEEDED if -limit <= low and high <= limit else Tanh.call(input)


@_loses_tails(F.tanhshrink, reference="torch.tanh")
def _tanhshrink(input: Tensor) -> Any:
    tanh = _tanh(input)
    return input - tanh if isinstance(tanh, Tensor) else tanh


@_loses_tails(F.logsigmoid, reference="derivatives of $\\sigma(-x)$")
def _logsigmoid(input: Tensor) -> Any:
    return LogSigmoid.call(input) if _exceed(input, _far(input.dtype)) else UNNEEDED


@_loses_tails(
    F.softplus,
    lean=recorded("softplus", beta=1.0, threshold=20.0),
    least_elements=LEAST_ELEMENTS,
    reference="derivatives of $\\sigma(\\beta x)$ below the threshold",
)
def _softplus(input: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Any:
    if beta <= 0 or not _exceed(input, _far(input.dtype) / beta):
        return UNNEEDED
    linear = input.detach() * beta > threshold
    curved = -LogSigmoid.call(-beta * torch.where(linear, 0, input)) / beta
    return with_value(torch.where(linear, input, curved), F.softplus(input.detach(), beta, threshold))


@_loses_tails(
    torch.log_softmax,
    Tensor.log_softmax,
    torch.special.log_softmax,
    name="torch.log_softmax",
    reference="$\\log(1 + s)$ of the sum s of all terms but the largest",
)
def _log_softmax(input: Tensor, dim: Any, dtype: torch.dtype | None = None) -> Any:
    x = input if dtype is None else input.to(dtype)
    plain = _seen(x) if isinstance(dim, int) else None
    if plain is None:
        return UNNEEDED
    low, high = _range(plain)
    if not math.isfinite(high) or high - low < _far(x.dtype):
        return UNNEEDED
    value = torch.log_softmax(x.detach(), dim)
    if below_transforms(value).max().item() < -(torch.finfo(x.dtype).eps ** (2 / 3)):
        return UNNEEDED
    largest = x.detach().argmax(dim, keepdim=True)
    is_largest = torch.zeros_like(value, dtype=torch.bool).scatter(dim, largest, True)
    behind = x - x.gather(dim, largest)
    others = torch.where(is_largest, 0, behind.exp()).sum(dim, keepdim=True)
    return with_value(torch.where(is_largest, 0, behind) - others.log1p(), value)


@_loses_tails(F.log_softmax, reference="torch.log_softmax")
def _functional_log_softmax(
    input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> Any:
    del _stacklevel
    return UNNEEDED if dim is None else _log_softmax(input, dim, dtype)
