r"""The logistic function $\sigma(z) = 1 / (1 + e^{-z})$ and the Functions that express its derivatives.

Two Functions express all derivatives, without a difference of nearly equal numbers at any order:

$$ \sigma' = b, \qquad b' = -b\, t, \qquad t' = 2 b, \qquad b(z) = \sigma(z)\,\sigma(-z), \quad t(z) = \tanh(z/2). $$
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hodiff.common.overriding import overridable
from hodiff.rules.arguments import require_broadcastable, require_floating, require_number_or_floating
from hodiff.rules.elementwise import ElementwiseFunction

# Beyond this bound, every derivative of σ is zero in float64. Clamped arguments make its product with the argument
# zero, too, not 0 · ∞.
SATURATED = 1e3


class BellSlope(ElementwiseFunction):
    """The second derivative of σ, -b(z) t(z). Saves its input."""

    kernel = "bell_slope"

    @staticmethod
    def forward(z: Tensor) -> Tensor:
        """Compute $-b(z) t(z)$."""
        return torch.sigmoid(z) * torch.sigmoid(-z) * torch.tanh(-0.5 * z)

    @staticmethod
    def slope(index: int, z: Tensor) -> Tensor:
        """Compute $b (t^2 - 2b)$."""
        b, t = Bell.call(z), HalfTanh.call(z)
        return b * (t * t - 2 * b)


class Bell(ElementwiseFunction):
    """The derivative of σ, σ(z) σ(-z). Saves its input."""

    kernel = "bell"
    derivative = BellSlope

    @staticmethod
    def forward(z: Tensor) -> Tensor:
        """Compute $b(z)$; not as σ - σ², which loses all digits for large z."""
        return torch.sigmoid(z) * torch.sigmoid(-z)


class Logistic(ElementwiseFunction):
    """σ(z), whose derivatives keep all digits in both tails. Saves its input."""

    kernel = "sigmoid"
    derivative = Bell

    @staticmethod
    def forward(z: Tensor) -> Tensor:
        """Compute $σ(z)$."""
        return torch.sigmoid(z)


class HalfTanh(ElementwiseFunction):
    """tanh(z/2). Saves its input."""

    @staticmethod
    def forward(z: Tensor) -> Tensor:
        """Compute $t(z)$."""
        return torch.tanh(0.5 * z)

    @staticmethod
    def slope(index: int, z: Tensor) -> Tensor:
        """Compute $2 b(z)$."""
        return 2 * Bell.call(z)


class BernoulliEntropy(ElementwiseFunction):
    r"""$\log(1 + e^z) - z\,\sigma(z)$, the entropy of a coin with log-odds z. Saves its input."""

    @staticmethod
    def forward(z: Tensor) -> Tensor:
        """Compute it as a sum of positive terms in |z|, because it is even."""
        size = z.abs().clamp(max=SATURATED)
        return size * torch.sigmoid(-size) - F.logsigmoid(size)

    @staticmethod
    def slope(index: int, z: Tensor) -> Tensor:
        """Compute $-z b(z)$."""
        z = z.clamp(-SATURATED, SATURATED)
        return -(z * Bell.call(z))


class ScaledSigmoid(ElementwiseFunction):
    """The Function behind `scaled_sigmoid`, for a constant scale. Saves its output, which the next layer saves anyway.

    The derivative is $y (1 - y/s)$, so its error is relative to the scale, not to itself, where σ is close to 1.
    """

    saves_output = True

    @staticmethod
    def forward(x: Tensor, scale: float) -> Tensor:
        """Compute $s σ(x)$."""
        return scale * torch.sigmoid(x)

    @staticmethod
    def residuals(inputs: Sequence[Any], output: Any) -> Sequence[Any]:
        """Return the output and the scale."""
        return output, inputs[1]

    @staticmethod
    def slope(index: int, y: Tensor, scale: float) -> Tensor:
        """Compute $y (1 - y/s)$."""
        return Parabola.call(y, scale) if scale else y


class Parabola(ElementwiseFunction):
    """$y (1 - y/s)$ for a constant s. Saves its input."""

    @staticmethod
    def forward(y: Tensor, scale: float) -> Tensor:
        """Compute it in one pass."""
        return torch.addcmul(y, y, y, value=-1 / scale)

    @staticmethod
    def slope(index: int, y: Tensor, scale: float) -> Tensor:
        """Compute $1 - 2y/s$."""
        return torch.rsub(y, 1, alpha=2 / scale)


@overridable
def scaled_sigmoid(x: Tensor, scale: Tensor | float = 1.0) -> Tensor:
    r"""Logistic function between 0 and a scale, $s\,\sigma(x)$ with $\sigma(x) = 1 / (1 + e^{-x})$.

    Backward needs only the output, and the input is not saved. Derivatives therefore lose digits where the output is
    near s: beyond x = 1 they have the absolute precision of $1 - \sigma(x)$, and at 37 they are zero in float64. If
    that tail matters, use `torch.sigmoid` within `hodiff.corrected()`, which saves x. With a tensor as scale,
    $\sigma(x)$ and the scale are saved, because $\sigma = y/s$ is lost where a learned scale is zero.

    Args:
        x: Floating-point tensor of any shape.
        scale: Number, or floating-point tensor that broadcasts with `x` and may require a gradient.

    Returns:
        Tensor of the broadcast shape.

    Raises:
        InputError: If an argument is invalid.

    Example:
        >>> import torch
        >>> scaled_sigmoid(torch.tensor([-1.0, 0.0, 1.0]), 2.0)
        tensor([0.5379, 1.0000, 1.4621])

    Source: Y. LeCun, L. Bottou, G. Orr & K.-R. Müller, "Efficient BackProp", 1998, section 4.4.
    """
    require_floating("scaled_sigmoid", x=x)
    require_number_or_floating("scaled_sigmoid", scale=scale)
    require_broadcastable("scaled_sigmoid", x=x, scale=scale)
    if isinstance(scale, Tensor):
        return scale * ScaledSigmoid.call(x, 1.0)
    return ScaledSigmoid.call(x, scale)
