r"""Smooth activations that gate their input, $x\,g(x)$, with exact derivatives of every order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hodiff.common.options import require_choice
from hodiff.common.overriding import overridable
from hodiff.functions.activations.gated_derivatives import (
    FLAT,
    GELUSlope,
    GELUTanhSlope,
    MishSlope,
    SiLUCurvature,
    SiLUSlope,
    cubic,
)
from hodiff.functions.activations.rectifiers import where_positive
from hodiff.functions.logistic import SATURATED, Bell, BellSlope
from hodiff.kernels import fused
from hodiff.rules.any_order import AnyOrderFunction
from hodiff.rules.arguments import require_broadcastable, require_floating, require_number_or_floating
from hodiff.rules.elementwise import ElementwiseFunction, batch_in_front
from hodiff.rules.nesting import nestable_jvp


class Swish(ElementwiseFunction):
    """The Function behind `swish`. Saves its inputs."""

    @staticmethod
    def forward(x: Tensor, beta: Any) -> Tensor:
        """Compute $x σ(βx)$."""
        z = beta * x
        if z.shape == x.shape and fused.takes(x, z):
            return fused.elementwise("gate", z, x)
        s = torch.sigmoid(z)
        return where_positive(x * s, s)  # zero at -∞ too

    @staticmethod
    def scaled_slope(vector: Tensor, index: int, *residuals: Any) -> Tensor:
        """Multiply by $σ(z) + z b(z)$ for x or $x^2 b(z)$ for β, with $z = βx$ and b the derivative of σ."""
        x, beta = residuals
        z = beta * x
        return SiLUSlope.scaled(vector, z) if index == 0 else x * Bell.scaled(vector * x, z)

    @staticmethod
    def pull(cotangent: Tensor, wanted: Sequence[bool], shapes: Sequence[Any], *residuals: Any) -> list[Tensor | None]:
        """Pull back to x and β, sharing z; a single β takes an inner product."""
        x, beta = residuals
        z = beta * x
        if all(wanted) and fused.suit(cotangent, x, z):
            by_x, halfway = GatePullback.call(cotangent, x, z)
            return [by_x, _inner(x, halfway, shapes[1])]
        return [
            SiLUSlope.scaled(cotangent, z).sum_to_size(shapes[0]) if wanted[0] else None,
            _inner(x, Bell.scaled(cotangent * x, z), shapes[1]) if wanted[1] else None,
        ]


class GatePullback(AnyOrderFunction):
    r"""The products $c\,(σ(z) + z b(z))$ and $c\,x\,b(z)$ for the cotangents of `Swish`. Saves its inputs."""

    @staticmethod
    def forward(c: Tensor, x: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        """Compute both products."""
        if c.shape == x.shape == z.shape and fused.takes(c, x, z):
            return fused.pullback("gate", z, x, c)
        return c * SiLUSlope.forward(z), c * x * Bell.forward(z)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Save the inputs."""
        del output
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)
        ctx.shapes = tuple(each.shape for each in inputs)

    @staticmethod
    def backward(ctx: Any, u: Tensor, w: Tensor) -> Any:
        """Return the cotangents of c, x and z."""
        c, x, z = ctx.saved_tensors
        if u.shape == c.shape == x.shape == z.shape and fused.takes(u, w, c, x, z):
            return fused.gate_curvature(u, w, c, x, z)
        by_c = SiLUSlope.scaled(u, z) + Bell.scaled(w * x, z)
        by_x = Bell.scaled(w * c, z)
        by_z = SiLUCurvature.scaled(u * c, z) + BellSlope.scaled(w * c * x, z)
        return tuple(each.sum_to_size(shape) for each, shape in zip((by_c, by_x, by_z), ctx.shapes, strict=True))

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, c_t: Tensor | None, x_t: Tensor | None, z_t: Tensor | None) -> tuple[Tensor, Tensor]:
        """Apply the product rule."""
        c, x, z = ctx.saved_tensors
        c_t, x_t, z_t = (torch.zeros_like(z) if each is None else each for each in (c_t, x_t, z_t))
        first = SiLUSlope.scaled(c_t, z) + SiLUCurvature.scaled(c * z_t, z)
        return first, Bell.scaled(c_t * x + c * x_t, z) + BellSlope.scaled(c * x * z_t, z)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Tensor) -> Any:
        """Apply the elementwise function to the whole batch."""
        del info
        return GatePullback.call(*torch.broadcast_tensors(*batch_in_front(in_dims, inputs))), (0, 0)


def _inner(a: Tensor, b: Tensor, shape: Sequence[int]) -> Tensor:
    """Sum the product of two tensors to a shape; in one pass if the shape holds a single number."""
    if math.prod(shape) == 1 and a.shape == b.shape:
        return torch.dot(a.reshape(-1), b.reshape(-1)).reshape(shape)
    return (a * b).sum_to_size(shape)


class SiLU(ElementwiseFunction):
    """The Function behind `silu`. Saves its input, because the output does not determine it."""

    kernel = "silu"
    derivative = SiLUSlope

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        """Compute $x σ(x)$."""
        return F.silu(x.clamp(min=-SATURATED))


class GELU(ElementwiseFunction):
    """The Function behind `gelu`. Saves its input."""

    kernel = "gelu"
    derivative = GELUSlope

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        """Compute $x Φ(x)$; by erfc, as 1 + erf loses all digits for negative x."""
        x = x.clamp(min=-FLAT)
        return x * (0.5 * torch.erfc(x * -math.sqrt(0.5)))


class GELUTanh(ElementwiseFunction):
    """The Function behind `gelu` with `approximate="tanh"`. Saves its input."""

    kernel = "gelu_tanh"
    derivative = GELUTanhSlope

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        """Compute $x σ(v)$, which is the tanh form without its difference of nearly equal numbers."""
        x = x.clamp(min=-FLAT)
        return x * torch.sigmoid(cubic(x.clamp(max=FLAT))[0])


class Mish(ElementwiseFunction):
    """The Function behind `mish`. Saves its input."""

    kernel = "mish"
    derivative = MishSlope

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        """Compute $x tanh(log(1 + e^x))$."""
        return F.mish(x.clamp(min=-SATURATED))


@overridable
def swish(x: Tensor, beta: Tensor | float = 1.0) -> Tensor:
    r"""Swish, $x\,\sigma(\beta x)$ with $\sigma(z) = 1 / (1 + e^{-z})$.

    Args:
        x: Floating-point tensor of any shape.
        beta: Number, or floating-point tensor that broadcasts with `x` and may require a gradient.

    Returns:
        Tensor of the broadcast shape.

    Raises:
        InputError: If an argument is invalid.

    Example:
        >>> import torch
        >>> swish(torch.tensor([-1.0, 0.0, 1.0]))
        tensor([-0.2689,  0.0000,  0.7311])

    Source: P. Ramachandran, B. Zoph & Q. V. Le, "Searching for activation functions", 2017, section 3.
    """
    require_floating("swish", x=x)
    require_number_or_floating("swish", beta=beta)
    require_broadcastable("swish", x=x, beta=beta)
    return Swish.call(x, beta)


@overridable
def silu(x: Tensor) -> Tensor:
    r"""Sigmoid linear unit, $x\,\sigma(x)$.

    Args:
        x: Floating-point tensor of any shape.

    Returns:
        Tensor of the same shape.

    Raises:
        InputError: If `x` is not a floating-point tensor.

    Example:
        >>> import torch
        >>> torch.func.grad(torch.func.grad(silu))(torch.tensor(0.0))
        tensor(0.5000)

    Source: D. Hendrycks & K. Gimpel, "Gaussian error linear units", 2016, section 4.
    """
    require_floating("silu", x=x)
    return SiLU.call(x)


@overridable
def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    r"""Gaussian error linear unit, $x\,\Phi(x)$ with the normal distribution function $\Phi$.

    With `approximate="tanh"` it is $\tfrac{x}{2} (1 + \tanh(\sqrt{2/\pi}\,(x + 0.044715\,x^3)))$.

    Args:
        x: Floating-point tensor of any shape.
        approximate: `"none"` or `"tanh"`.

    Returns:
        Tensor of the same shape, to relative accuracy for negative `x` too.

    Raises:
        InputError: If an argument is invalid.

    Example:
        >>> import torch
        >>> gelu(torch.tensor([-1.0, 0.0, 1.0]))
        tensor([-0.1587,  0.0000,  0.8413])

    Source: D. Hendrycks & K. Gimpel, "Gaussian error linear units", 2016, section 2.
    """
    require_floating("gelu", x=x)
    require_choice("gelu", "approximate", approximate, ("none", "tanh"))
    return GELU.call(x) if approximate == "none" else GELUTanh.call(x)


@overridable
def mish(x: Tensor) -> Tensor:
    r"""Mish, $x \tanh(\log(1 + e^x))$.

    Args:
        x: Floating-point tensor of any shape.

    Returns:
        Tensor of the same shape.

    Raises:
        InputError: If `x` is not a floating-point tensor.

    Example:
        >>> import torch
        >>> mish(torch.tensor([-1.0, 0.0, 1.0]))
        tensor([-0.3034,  0.0000,  0.8651])

    Source: D. Misra, "Mish: a self regularized non-monotonic activation function", 2019, equation 1.
    """
    require_floating("mish", x=x)
    return Mish.call(x)
