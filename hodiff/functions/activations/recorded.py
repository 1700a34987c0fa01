r"""Activations that cache their first two derivatives, for many products at one point.

A product with a Hessian pulls one cotangent through $y = g(x)$ and one through its gradient $c\,g'(x)$:

$$ \bar x = \bar y\, g'(x), \qquad \bar c = u\, g'(x), \qquad \bar x = u\, [c\, g''(x)]. $$

The factors depend on the point alone. With cached factors, a product costs multiplications, while torch's operators
recompute exponentials. Derivatives never go through the cache: a recorded backward pass uses Functions of x.

tanh and sigmoid are not in the table: their derivatives are polynomials of the output, which the next layer saves
anyway, so torch saves less.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hodiff.functions.activations.gated import GELUSlope, SiLUSlope
from hodiff.functions.activations.gated_derivatives import (
    GELUCurvature,
    GELUTanhCurvature,
    GELUTanhSlope,
    MishCurvature,
    MishSlope,
    SiLUCurvature,
)
from hodiff.functions.logistic import Bell, Logistic
from hodiff.rules.any_order import AnyOrderFunction
from hodiff.rules.elementwise import batch_in_front
from hodiff.rules.nesting import nestable_jvp
from hodiff.torch_internals.autograd.grad_mode import in_forward_mode

# Torch's softplus is the identity above this threshold.
LINEAR = 20.0


class Smooth(NamedTuple):
    """An activation: its value, its first two derivatives, and Functions that multiply a vector by them."""

    value: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]
    curvature: Callable[[Tensor], Tensor]
    scaled_slope: Callable[[Tensor, Tensor], Tensor]
    scaled_curvature: Callable[[Tensor, Tensor], Tensor]


def _smooth(value: Callable[[Tensor], Tensor], slope: Any, curvature: Any) -> Smooth:
    return Smooth(value, slope.forward, curvature.forward, slope.scaled, curvature.scaled)


def _below(x: Tensor, linear: Any, curved: Tensor) -> Tensor:
    return torch.where(x.detach() > LINEAR, linear, curved)


SMOOTH = {
    "gelu": _smooth(F.gelu, GELUSlope, GELUCurvature),
    "gelu_tanh": _smooth(lambda x: F.gelu(x, approximate="tanh"), GELUTanhSlope, GELUTanhCurvature),
    "silu": _smooth(F.silu, SiLUSlope, SiLUCurvature),
    "mish": _smooth(F.mish, MishSlope, MishCurvature),
    "softplus": Smooth(
        F.softplus,
        lambda x: _below(x, 1.0, Logistic.forward(x)),
        lambda x: _below(x, 0.0, Bell.forward(x)),
        lambda v, x: _below(x, v, Logistic.scaled(v, x)),
        lambda v, x: _below(x, 0.0, Bell.scaled(v, x)),
    ),
}


class RecordedActivation(AnyOrderFunction):
    """An activation and, as a constant, its derivative. Saves the input and the derivative."""

    @staticmethod
    def forward(x: Tensor, name: str) -> tuple[Tensor, Tensor]:
        """Compute $g(x)$ and $g'(x)$."""
        return SMOOTH[name].value(x), SMOOTH[name].slope(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        """Save the input, and the derivative as a cache."""
        x, ctx.activation = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(x, output[1])
        ctx.save_for_forward(x)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor | None, _: None) -> tuple[Tensor | None, None]:
        """Multiply the cotangent by the derivative."""
        if cotangent is None:
            return None, None
        x, slope = ctx.saved_tensors
        if _nothing_records():
            return cotangent * slope, None
        return RecordedSlope.call(cotangent, x, slope, ctx.activation)[0], None

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, tangent: Tensor, _: None) -> tuple[Tensor, None]:
        """Multiply the tangent by the derivative."""
        (x,) = ctx.saved_tensors
        return SMOOTH[ctx.activation].scaled_slope(tangent, x), None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int, None], x: Tensor, name: str) -> Any:
        """Apply the elementwise function to the whole batch."""
        return RecordedActivation.call(x.movedim(in_dims[0], 0), name), (0, 0)


class RecordedSlope(AnyOrderFunction):
    r"""$c\,g'(x)$ and, as a constant, $c\,g''(x)$. Saves c, x, $g'(x)$ and $c\,g''(x)$."""

    @staticmethod
    def forward(c: Tensor, x: Tensor, slope: Tensor, name: str) -> tuple[Tensor, Tensor]:
        r"""Compute $c\,g'(x)$ and $c\,g''(x)$."""
        return c * slope, c * SMOOTH[name].curvature(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        """Save the inputs, and the second derivative as a cache."""
        c, x, slope, ctx.activation = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(c, x, slope, output[1])
        ctx.save_for_forward(c, x)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, u: Tensor | None, _: None) -> tuple[Tensor | None, Tensor | None, None, None]:
        r"""Return $u\,g'(x)$ for c and $u\,c\,g''(x)$ for x."""
        if u is None:
            return None, None, None, None
        c, x, slope, bend = ctx.saved_tensors
        needs_c, needs_x = ctx.needs_input_grad[:2]
        if _nothing_records():
            return u * slope if needs_c else None, u * bend if needs_x else None, None, None
        smooth = SMOOTH[ctx.activation]
        return (
            smooth.scaled_slope(u, x) if needs_c else None,
            smooth.scaled_curvature(u * c, x) if needs_x else None,
            None,
            None,
        )

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, c_t: Tensor | None, x_t: Tensor | None, *_: None) -> tuple[Tensor, None]:
        """Apply the product rule."""
        c, x = ctx.saved_tensors
        smooth = SMOOTH[ctx.activation]
        terms = [] if c_t is None else [smooth.scaled_slope(c_t, x)]
        terms += [] if x_t is None else [smooth.scaled_curvature(c * x_t, x)]
        return terms[0] if len(terms) == 1 else terms[0] + terms[1], None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> Any:
        """Broadcast the batch to all inputs of the elementwise function."""
        tensors = torch.broadcast_tensors(*batch_in_front(in_dims[:3], inputs[:3]))
        return RecordedSlope.call(*tensors, inputs[3]), (0, 0)


def record(x: Tensor, name: str) -> Tensor:
    """Compute an activation of `SMOOTH`, recorded for many products."""
    value: Tensor = RecordedActivation.call(x, name)[0]
    return value


def _nothing_records() -> bool:
    return not torch.is_grad_enabled() and not in_forward_mode()
