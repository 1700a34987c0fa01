"""Rule for `ldexp`: products with powers of two."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from hodiff.corrections.declining import UNNEEDED, Declined
from hodiff.corrections.registry import register
from hodiff.routes import ROUTES
from hodiff.rules.elementwise import ElementwiseFunction


class PowerOfTwoTimes(ElementwiseFunction):
    r"""$2^e x$ for integers e, linear in x. Saves e alone."""

    @staticmethod
    def forward(x: Tensor, exponent: Tensor) -> Tensor:
        """Compute the value by torch's kernel."""
        return torch.ldexp(x, exponent)

    @staticmethod
    def residuals(inputs: Any, output: Any) -> Any:
        """Return the exponents alone."""
        return (inputs[1],)

    @staticmethod
    def scaled_slope(vector: Tensor, index: int, *residuals: Any) -> Tensor:
        """Return $2^e$ times the vector."""
        (exponent,) = residuals
        return PowerOfTwoTimes.call(vector, exponent)


_ldexp_is_wrong = partial(
    register,
    routes=ROUTES,
    reason="the power of two is computed in whole numbers, in which negative exponents give 0",
    reference="it is linear",
    mended="2.14",
)


@_ldexp_is_wrong(torch.ldexp, Tensor.ldexp, name="torch.ldexp")
def _ldexp(input: Tensor, other: Tensor) -> Any:
    if other.is_floating_point() or other.is_complex():
        return UNNEEDED
    if input.is_complex() or (input.is_floating_point() and torch.compiler.is_compiling()):
        return input * torch.pow(2.0, other.to(input.real.dtype))
    return PowerOfTwoTimes.call(input, other) if input.is_floating_point() else UNNEEDED


@_ldexp_is_wrong(Tensor.ldexp_)
def _ldexp_(input: Tensor, other: Tensor) -> Any:
    result = _ldexp(input.clone(), other)
    return result if isinstance(result, Declined) else input.copy_(result)
