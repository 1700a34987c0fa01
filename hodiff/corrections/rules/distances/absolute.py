"""Rules for absolute values and roots, which keep their even powers smooth at 0."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hodiff.corrections.mechanism.declining import INVALID, UNNEEDED
from hodiff.corrections.mechanism.in_place_variants import in_place
from hodiff.corrections.mechanism.registry import register
from hodiff.corrections.rules.distances.lengths import remembered, squared
from hodiff.routes import ROUTES
from hodiff.rules.elementwise import ElementwiseFunction
from hodiff.torch_internals.autograd.differentiation import may_be_differentiated
from hodiff.torch_operators.table import forms_of

_loses_squares = partial(
    register,
    routes=ROUTES,
    reason="at 0 the second derivative of its square, or of another smooth function of it, is 0 or NaN",
    reference="$|x|^2 = x^2$; 0 at 0",
)


@_loses_squares(*forms_of("abs"))
def _abs(input: Tensor) -> Any:
    if not is_remembered(input):
        return UNNEEDED
    return remembered(_absolute(input), lambda: _square(input), (input,), of=input, kind="absolute")


def _absolute(x: Tensor) -> Tensor:
    if x.is_complex():
        # At 0 torch's third derivative is NaN. The product with 0 keeps derivatives that are NaN already.
        zero = x.detach() == 0
        return torch.where(zero, (0 * x).real, torch.where(zero, 1, x).abs())
    # Products with a constant have shorter second derivatives than torch.abs. The sum turns -0 into 0.
    return x * x.detach().sgn() + 0.0


def is_remembered(input: Tensor) -> bool:
    """Whether derivatives of an absolute value may be asked for, so that its even powers need to be known."""
    return (
        not torch.compiler.is_compiling()
        and (input.is_floating_point() or input.is_complex())
        and may_be_differentiated((input,))
    )


def _square(x: Tensor) -> Tensor:
    if not x.is_complex():
        return x.square()
    x = x.resolve_conj()  # vmap has no rule for the imaginary part of a view that is conjugated
    return x.real.square() + x.imag.square()


@_loses_squares(F.l1_loss)
def _l1_loss(
    input: Tensor,
    target: Tensor,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
    weight: Tensor | None = None,
) -> Any:
    if weight is not None and torch.compiler.is_compiling():
        # Compiled code calls torch's function in a mode, from which it hides the weight.
        if size_average is not None or reduce is not None or weight.shape != input.shape:
            return INVALID
        losses = (input - target).abs() * weight
        return losses.sum() / weight.sum() if reduction == "mean" else losses.sum() if reduction == "sum" else losses
    one_by_one = reduction == "none" or (isinstance(input, Tensor) and input.numel() == 1)
    if size_average is not None or reduce is not None or weight is not None or not one_by_one:
        return UNNEEDED
    if not isinstance(target, Tensor) or input.shape != target.shape or not may_be_differentiated((input, target)):
        return UNNEEDED
    difference = input - target
    length = remembered(difference.abs(), lambda: _square(difference), (difference,), kind="absolute")
    if reduction == "none":
        return length
    return remembered(length.reshape(()), lambda: _square(difference).reshape(()), (difference,), kind="absolute")


@_loses_squares(*forms_of("sqrt"))
def _sqrt(input: Tensor) -> Any:
    if not is_remembered(input):
        return UNNEEDED
    return remembered(torch.sqrt(input), lambda: _radicand(input), (input,), kind="root")


def _radicand(x: Tensor) -> Tensor:
    return x if x.is_complex() else torch.where(x < 0, torch.nan, x)


class Hypot(ElementwiseFunction):
    r"""$h = \sqrt{x^2 + y^2}$. Saves its inputs."""

    @staticmethod
    def forward(x: Tensor, y: Tensor) -> Tensor:
        """Compute h without squares, which may overflow."""
        return torch.hypot(x, y)

    @staticmethod
    def slope(index: int, x: Tensor, y: Tensor) -> Tensor:
        """$x / h$ and $y / h$."""
        return Share.call(x, y) if index == 0 else Share.call(y, x)


class Share(ElementwiseFunction):
    """$x / h$, or 0 where $h$ is 0. Its derivatives are products, without differences. Saves its inputs."""

    @staticmethod
    def forward(x: Tensor, y: Tensor) -> Tensor:
        """Divide."""
        h = torch.hypot(x, y)
        return x / torch.where(h == 0, 1, h)

    @staticmethod
    def slope(index: int, x: Tensor, y: Tensor) -> Tensor:
        """$(y / h)^2 / h$ and $-(x / h) (y / h) / h$."""
        other = Share.call(y, x)
        return (other if index == 0 else -Share.call(x, y)) * (other * InverseHypot.call(x, y))


class InverseHypot(ElementwiseFunction):
    """$1 / h$, or 0 where $h$ is 0. Saves its inputs."""

    @staticmethod
    def forward(x: Tensor, y: Tensor) -> Tensor:
        """Divide."""
        h = torch.hypot(x, y)
        return torch.where(h == 0, 0, 1 / h)

    @staticmethod
    def slope(index: int, x: Tensor, y: Tensor) -> Tensor:
        """$-(x / h) / h^2$ and $-(y / h) / h^2$."""
        inverse = InverseHypot.call(x, y)
        return -(Share.call(x, y) if index == 0 else Share.call(y, x)) * inverse * inverse


_hypot_loses_digits = partial(
    register,
    routes=ROUTES,
    reason="derivatives at 0 are NaN; second derivatives are a difference that loses all digits",
    reference="$h^2 = x^2 + y^2$; products of $x / h$, $y / h$ and $1 / h$; 0 at 0",
)


@_hypot_loses_digits(*forms_of("hypot"))
def _hypot(input: Tensor, other: Tensor) -> Any:
    if torch.compiler.is_compiling() or not may_be_differentiated((input, other)):
        return UNNEEDED
    dtype = torch.result_type(input, other)
    x, y = input.to(dtype), other.to(dtype)
    return remembered(Hypot.call(x, y), lambda: squared(x) + squared(y), (x, y))


_hypot_loses_digits(Tensor.hypot_)(in_place(_hypot))
