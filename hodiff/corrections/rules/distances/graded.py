r"""Elementwise functions of tensors $E + O\, n$ at zeros of the length n, and kinds of other functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hodiff.rules.elementwise import ElementwiseFunction
from hodiff.torch_operators.operator import Kind, Pieces
from hodiff.torch_operators.table import OPERATORS, functions_of_kind, with_aliases


def _made_of(pieces: Pieces) -> set[str]:
    return {name for each in OPERATORS if each.pieces is pieces for name in each.short_names}


# Piecewise linear functions of one tensor, and numbers.
PIECEWISE_LINEAR = _made_of(Pieces.LINES) | {
    "_threshold",  # the name of torch.nn.functional.threshold
    *("clipped_relu", "soft_threshold"),  # of hodiff.functions
}
PIECEWISE = PIECEWISE_LINEAR | _made_of(Pieces.CURVES)
# Functions of one tensor, and numbers, that are smooth or piecewise smooth wherever they are finite.
UNARY = {name for each in OPERATORS if each.smooth for name in each.short_names} | {
    *PIECEWISE,
    "log_sigmoid",  # the name of torch.nn.functional.logsigmoid, and of hodiff.functions, as all below
    *("log_cosh", "logistic", "scaled_sigmoid", "swish"),
}
# Functions that move or convert elements, and do not fill with a given value.
STRUCTURAL = with_aliases("__get__ where clone contiguous to float double half bfloat16 type type_as cpu cuda") | {
    name for each in functions_of_kind(Kind.MOVES) if "value" not in each.parameters for name in each.short_names
}
# Functions that are linear, or select elements; nonlinear functions of a sum of lengths have no derivative at 0.
LINEAR = with_aliases("""
    sum mean nansum nanmean cumsum trace add sub rsub mul div neg pos conj resolve_conj real
    max min amax amin sort topk median kthvalue quantile nanquantile mode index_add scatter_add index_put scatter
""")
# Functions that select elements by their size, some of which are in LINEAR.
SELECTING = _made_of(Pieces.ELEMENTS)
# Functions that are linear in each of their tensors.
MULTILINEAR = with_aliases("""
    matmul rmatmul mm bmm mv addmm addmv addbmm baddbmm linear bilinear einsum tensordot inner outer dot vdot kron
    conv1d conv2d conv3d chain_matmul linalg.multi_dot
""")
# Order at which the series of an elementwise function is cut off. Derivatives from two orders above it are NaN.
_ORDER = 4


def _of_power(x: Tensor, exponent: float) -> list[Any]:
    coefficients: list[Any] = [torch.pow(x, exponent)]
    factor = 1.0
    for k in range(1, _ORDER + 1):
        factor *= (exponent - k + 1) / k
        coefficients.append(factor * torch.pow(x, exponent - k) if factor else torch.zeros_like(x))
    return coefficients


def _of_exponential(x: Tensor) -> list[Any]:
    value = torch.exp(x)
    return [value / math.factorial(k) for k in range(_ORDER + 1)]


def _alternating(value: Tensor, other: Tensor, sign: int, other_sign: int) -> list[Any]:
    """Coefficients of a function whose second derivative is a multiple of itself, such as sin."""
    signs = (1, sign, sign * other_sign, sign * sign * other_sign, 1)
    return [s * (other if k % 2 else value) / math.factorial(k) for k, s in enumerate(signs)]


# Taylor coefficients at any x in closed form. Other functions use nested forward mode, which is slower.
_SERIES: dict[str, Callable[[Tensor], list[Any]]] = {
    "exp": _of_exponential,
    "expm1": lambda x: [torch.expm1(x), *_of_exponential(x)[1:]],
    "log": lambda x: [torch.log(x), *((-1) ** (k + 1) / k * x**-k for k in range(1, _ORDER + 1))],
    "log1p": lambda x: [torch.log1p(x), *((-1) ** (k + 1) / k * (1 + x) ** -k for k in range(1, _ORDER + 1))],
    "sin": lambda x: _alternating(torch.sin(x), torch.cos(x), 1, -1),
    "cos": lambda x: _alternating(torch.cos(x), torch.sin(x), -1, 1),
    "sinh": lambda x: _alternating(torch.sinh(x), torch.cosh(x), 1, 1),
    "cosh": lambda x: _alternating(torch.cosh(x), torch.sinh(x), 1, 1),
    "square": lambda x: _of_power(x, 2.0),
    "sqrt": lambda x: _of_power(x, 0.5),
    "rsqrt": lambda x: _of_power(x, -0.5),
    "reciprocal": lambda x: _of_power(x, -1.0),
}


def _coefficients(name: str, function: Callable[[Tensor], Tensor], x: Tensor, numbers: Sequence[Any]) -> list[Any]:
    """Return the Taylor coefficients of an elementwise function at x."""
    if name in ("pow", "__pow__") and len(numbers) == 1 and isinstance(numbers[0], (int, float)):
        return _of_power(x, float(numbers[0]))
    if name in _SERIES and not numbers:
        return _SERIES[name](x)
    found = [function(x)]
    for k in range(1, _ORDER + 1):
        function = _derivative(function)
        found.append(function(x) / math.factorial(k))
    return found


def elementwise_parts(
    name: str,
    function: Callable[[Tensor], Tensor],
    numbers: Sequence[Any],
    parts: tuple[Tensor, Tensor],
    square: Tensor,
    zero: Tensor,
) -> tuple[Tensor, Tensor]:
    r"""Parts of φ(E + O n), by its series in $O^2 s$ at s = 0: $E' = \sum_k \varphi_{2k} O^{2k} s^k$, and so on."""
    # `square` is s at its zeros, of which `zero` is the mask, and the constant 0 elsewhere. The odd part that is
    # returned is without its factor n.
    even, odd = parts
    f0, f1, f2, f3, f4 = _coefficients(name, function, even, numbers)
    step = odd * odd * square
    cut_off = NotKnown.call(step, zero, _ORDER + 1)
    return f0 + f2 * step + f4 * step * step + cut_off, odd * (f1 + f3 * step)


def _derivative(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def slope(x: Tensor) -> Tensor:
        tangent: Tensor = torch.func.jvp(function, (x,), (torch.ones_like(x),))[1]
        return tangent

    return slope


class NotKnown(ElementwiseFunction):
    """The constant 0, with `known` derivatives that are 0; the next derivative is NaN at the elements `at`."""

    @staticmethod
    def forward(x: Tensor, at: Tensor, known: int) -> Tensor:
        """Return zeros."""
        return torch.zeros_like(x)

    @staticmethod
    def slope(index: int, x: Tensor, at: Tensor, known: int) -> Tensor | float:
        """Return zeros with one known derivative less, or NaN after the last."""
        if index:
            return 0.0
        return NotKnown.call(x, at, known - 1) if known else torch.where(at, torch.nan, 0.0).to(x.dtype)
