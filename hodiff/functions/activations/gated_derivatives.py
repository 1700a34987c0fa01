r"""Derivatives of smooth activations that gate their input, $x\,g(x)$, as Functions of their own.

A Hessian-vector product thus costs few operators and saves only the argument.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from hodiff.functions.logarithms import LogSigmoid
from hodiff.functions.logistic import SATURATED, Bell, HalfTanh, Logistic
from hodiff.rules.elementwise import ElementwiseFunction

# Beyond this bound, the normal density and all its derivatives are zero in float64, as are the derivatives of the tanh
# form.
FLAT = 64.0
# c and d of the tanh form, $x σ(c x (1 + d x²))$.
CUBIC = 2 * math.sqrt(2 / math.pi), 0.044715


class SiLUCurvature(ElementwiseFunction):
    """The second derivative of `silu`. Saves its input."""

    kernel = "silu_curvature"

    @staticmethod
    def forward(z: Tensor) -> Tensor:
        """Compute $b(z) (2 - z t(z))$ with $t = σ(z) - σ(-z)$, whose cancellation at 0 is multiplied by z."""
        z = z.clamp(-SATURATED, SATURATED)
        upper, lower = torch.sigmoid(z), torch.sigmoid(-z)
        return upper * lower * (2 - z * (upper - lower))

    @staticmethod
    def slope(index: int, z: Tensor) -> Tensor:
        """Compute $b (z (t^2 - 2b) - 3t)$ with $t = tanh(z/2)$."""
        z = z.clamp(-SATURATED, SATURATED)
        b, t = Bell.call(z), HalfTanh.call(z)
        return b * (z * (t * t - 2 * b) - 3 * t)


class SiLUSlope(ElementwiseFunction):
    """The derivative of `silu`. Saves its input."""

    kernel = "silu_slope"
    derivative = SiLUCurvature

    @staticmethod
    def forward(z: Tensor) -> Tensor:
        """Compute $σ(z) (1 + z σ(-z))$, whose second term is silu(-z)."""
        z = z.clamp(-SATURATED, SATURATED)
        return torch.sigmoid(z) * (1 - F.silu(-z))


class NormalDensity(ElementwiseFunction):
    r"""$\varphi(x) = e^{-x^2/2} / \sqrt{2 \pi}$. Saves its input."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        """Compute $φ(x)$."""
        return _normal_density(x)

    @staticmethod
    def slope(index: int, x: Tensor) -> Tensor:
        """Compute $-x φ(x)$."""
        return -(x * NormalDensity.call(x))


def _normal_density(x: Tensor) -> Tensor:
    return torch.exp(-0.5 * (x * x)) * (1 / math.sqrt(2 * math.pi))


class GELUCurvature(ElementwiseFunction):
    """The second derivative of `gelu`. Saves its input."""

    kernel = "gelu_curvature"

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        """Compute $φ(x) (2 - x^2)$."""
        x = x.clamp(-FLAT, FLAT)
        return _normal_density(x) * (2 - x * x)

    @staticmethod
    def slope(index: int, x: Tensor) -> Tensor:
        """Compute $φ(x) x (x^2 - 4)$."""
        x = x.clamp(-FLAT, FLAT)
        return NormalDensity.call(x) * (x * (x * x - 4))


class GELUSlope(ElementwiseFunction):
    """The derivative of `gelu`. Saves its input."""

    kernel = "gelu_slope"
    derivative = GELUCurvature

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        """Compute $Φ(x) + x φ(x)$."""
        x = x.clamp(-FLAT, FLAT)
        return 0.5 * torch.erfc(x * -math.sqrt(0.5)) + x * _normal_density(x)


class GELUTanhCurvature(ElementwiseFunction):
    """The second derivative of `gelu` with `approximate="tanh"`. Saves its input."""

    kernel = "gelu_tanh_curvature"

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        """Compute the second derivative by `_gated_curvature`."""
        x = x.clamp(-FLAT, FLAT)
        return _gated_curvature(x, *cubic(x))

    @staticmethod
    def slope(index: int, x: Tensor) -> Tensor:
        """Compute the third derivative by `_gated_third`."""
        x = x.clamp(-FLAT, FLAT)
        return _gated_third(x, *cubic(x), torch.full_like(x, 6 * CUBIC[0] * CUBIC[1]))


class GELUTanhSlope(ElementwiseFunction):
    """The derivative of `gelu` with `approximate="tanh"`. Saves its input."""

    kernel = "gelu_tanh_slope"
    derivative = GELUTanhCurvature

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        """Compute the derivative by `_gated_slope`."""
        x = x.clamp(-FLAT, FLAT)
        v, first, _ = cubic(x)
        return _gated_slope(x, v, first)


def cubic(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the argument $v = c x (1 + d x²)$ of σ and its first two derivatives."""
    (c, d), square = CUBIC, x * x
    return c * x * (1 + d * square), c * (1 + 3 * d * square), (6 * c * d) * x


class MishCurvature(ElementwiseFunction):
    """The second derivative of `mish`. Saves its input."""

    kernel = "mish_curvature"

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        """Compute it by `_gated_curvature`: $tanh(log(1 + e^x)) = σ(v)$ with $v = x + log(1 + e^x / 2)$."""
        x = x.clamp(-SATURATED, SATURATED)
        shifted = x - math.log(2)
        return _gated_curvature(x, x - LogSigmoid.call(-shifted), 1 + Logistic.call(shifted), Bell.call(shifted))

    @staticmethod
    def slope(index: int, x: Tensor) -> Tensor:
        """Compute the third derivative by `_gated_third`."""
        x = x.clamp(-SATURATED, SATURATED)
        shifted = x - math.log(2)
        b = Bell.call(shifted)
        third = -(b * HalfTanh.call(shifted))
        return _gated_third(x, x - LogSigmoid.call(-shifted), 1 + Logistic.call(shifted), b, third)


class MishSlope(ElementwiseFunction):
    """The derivative of `mish`. Saves its input."""

    kernel = "mish_slope"
    derivative = MishCurvature

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        """Compute the derivative by torch's kernel, or by `_gated_slope` in compiled code."""
        x = x.clamp(-SATURATED, SATURATED)
        if not torch.compiler.is_compiling():
            return torch.ops.aten.mish_backward(torch.ones_like(x), x)
        shifted = x - math.log(2)
        return _gated_slope(x, x - F.logsigmoid(-shifted), 1 + torch.sigmoid(shifted))


def _gated_slope(x: Tensor, v: Tensor, first: Tensor) -> Tensor:
    """Compute the derivative $σ(v) + x v' σ(v) σ(-v)$ of $x σ(v(x))$."""
    return torch.sigmoid(v) * (1 + x * first * torch.sigmoid(-v))


def _gated_curvature(x: Tensor, v: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Compute the second derivative $b(v) (2v' + x (v'' - v'^2 tanh(v/2)))$ of $x σ(v(x))$."""
    return Bell.call(v) * (2 * first + x * (second - first * first * HalfTanh.call(v)))


def _gated_third(x: Tensor, v: Tensor, first: Tensor, second: Tensor, third: Tensor) -> Tensor:
    """Compute the third derivative $b (I' - v' t I)$ of $x σ(v(x))$; $b I$ is the second, $t = tanh(v/2)$."""
    b, t = Bell.call(v), HalfTanh.call(v)
    bend = second - first * first * t
    inner = 2 * first + x * bend
    inner_slope = 2 * second + bend + x * (third - 2 * first * (second * t + first * first * b))
    return b * (inner_slope - first * t * inner)
