"""Rules for sums in the log domain."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hodiff.corrections.declining import UNNEEDED, Declined, unable
from hodiff.corrections.registry import register
from hodiff.functions.logistic import Logistic
from hodiff.routes import ROUTES
from hodiff.rules.elementwise import ElementwiseFunction


class LogAddExp(ElementwiseFunction):
    r"""$\log(e^a + e^b)$, whose derivatives are $\sigma(a - b)$ and $\sigma(b - a)$. Saves its inputs."""

    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        """Compute it by torch's kernel."""
        return torch.logaddexp(a, b)

    @staticmethod
    def slope(index: int, a: Tensor, b: Tensor) -> Tensor:
        """The share of one term."""
        # Two equal infinities have no difference; as the limit of equal numbers they share the derivative.
        difference = torch.where((a == b) & a.isinf(), 0, a - b)
        return Logistic.call(difference if index == 0 else -difference)


def _is_new(*_: Any, out: Any = None, **__: Any) -> bool:
    """Whether a call allocates its result: torch differentiates no other."""
    return out is None


def _declined(*inputs: Tensor) -> Declined:
    return unable("numbers are complex") if any(each.is_complex() for each in inputs) else UNNEEDED


@register(
    torch.logaddexp,
    torch.Tensor.logaddexp,
    name="torch.logaddexp",
    routes=("reverse-over-reverse", "reverse-over-forward"),
    reason="not finite where the difference of the terms overflows or both are infinite",
    reference="derivatives by the logistic function",
    covers=_is_new,
)
def _logaddexp(input: Tensor, other: Tensor) -> Any:
    if not (input.is_floating_point() and other.is_floating_point()):
        return _declined(input, other)
    return LogAddExp.call(input, other)


@register(
    torch.logcumsumexp,
    torch.Tensor.logcumsumexp,
    name="torch.logcumsumexp",
    routes=ROUTES[1:],
    reason="half of the digits are lost, and the third derivative is not finite",
    reference="a scan of logaddexp, W. D. Hillis & G. L. Steele (1986)",
    covers=_is_new,
)
def _logcumsumexp(input: Tensor, dim: int) -> Any:
    if not input.is_floating_point():
        return _declined(input)
    if not input.dim():
        return input.clone()
    y, step = input.movedim(dim, -1), 1
    while step < y.shape[-1]:
        y = torch.cat([y[..., :step], LogAddExp.call(y[..., step:], y[..., :-step])], -1)
        step *= 2
    return (y.clone() if y.shape[-1] < 2 else y).movedim(-1, dim)
