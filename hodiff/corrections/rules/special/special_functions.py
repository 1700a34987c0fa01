"""Registration of rules for functions in `torch.special`, by a formula for the derivative of each order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hodiff.corrections.mechanism.declining import UNNEEDED
from hodiff.corrections.mechanism.registry import register
from hodiff.errors import RouteError
from hodiff.routes import ROUTES
from hodiff.rules.elementwise import ElementwiseFunction
from hodiff.torch_internals.autograd.transforms import in_transform


class Tower(NamedTuple):
    """torch's kernel, its derivatives of order 1 and higher, and whether torch treats the kernel as a constant."""

    kernel: Callable[[Tensor], Tensor]
    derivative: Callable[[Tensor, int], Tensor]
    constant: bool


# Towers by their name in `torch.special`.
TOWERS: dict[str, Tower] = {}


class SpecialFunction(ElementwiseFunction):
    """Derivative of a given order of a function in `TOWERS`, in float64; order 0 is torch's value. Saves its input."""

    @staticmethod
    def forward(x: Tensor, name: str, order: int) -> Tensor:
        """Compute the value by torch's kernel, and derivatives by the formula."""
        kernel, derivative, constant = TOWERS[name]
        if order:
            return in_double(derivative, x, order)
        if constant:
            refuse_compiled_transforms(name)
        return kernel(x)

    @staticmethod
    def slope(index: int, x: Tensor, name: str, order: int) -> Tensor:
        """Return the derivative of the next order."""
        return SpecialFunction.call(x, name, order + 1)


def enter(
    name: str,
    derivative: Callable[[Tensor, int], Tensor],
    *others: Callable[..., Any],
    reason: str,
    reference: str,
    constant: bool = False,
) -> None:
    """Register the rule of `torch.special.name`, under its other names in torch as well."""
    # `derivative` computes the derivative of an order from 1 on, for float64. Where torch treats its kernel as a
    # constant, compiled transforms have to be refused.
    kernel = getattr(torch.special, name)
    TOWERS[name] = Tower(kernel, derivative, constant)

    @register(kernel, *others, name=f"torch.special.{name}", routes=ROUTES, reason=reason, reference=reference)
    def _special(input: Tensor, *, out: Tensor | None = None) -> Any:
        return SpecialFunction.call(input, name, 0) if out is None and input.is_floating_point() else UNNEEDED


def refuse_compiled_transforms(name: str) -> None:
    """Raise if torch would differentiate the kernel itself: transforms within compiled code see no Function."""
    if torch.compiler.is_compiling() and in_transform():
        raise RouteError(
            f"torch.special.{name}: inside a torch.func transform, torch.compile does not know its derivatives, which "
            "would be zero. Call the transform outside of torch.compile, or exclude this function from compilation."
        )


def in_double(formula: Callable[..., Tensor], x: Tensor, *options: Any) -> Tensor:
    """Compute a formula in float64, except on MPS: sums over nodes lose digits in float32."""
    return formula(x if x.device.type == "mps" else x.double(), *options).to(x.dtype)


def horner(coefficients: Sequence[float | Tensor], x: Tensor) -> Tensor:
    """Evaluate the polynomial with these coefficients, the constant first."""
    total = torch.zeros_like(x)
    for each in reversed(coefficients):
        total = total * x + each
    return total
