"""Rectifiers, hard and smooth."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hodiff.common.options import is_number, require_number
from hodiff.common.overriding import overridable
from hodiff.errors import InputError
from hodiff.functions.logistic import BernoulliEntropy, Logistic
from hodiff.kernels import fused
from hodiff.rules.any_order import AnyOrderFunction
from hodiff.rules.arguments import require_broadcastable, require_floating, require_number_or_floating
from hodiff.rules.elementwise import ElementwiseFunction
from hodiff.rules.nesting import nestable_jvp
from hodiff.rules.saving import SavingFunction


class ReLU(SavingFunction):
    """The Function behind `relu`. Saves its output, which the next layer saves anyway.

    The output is detached before it masks the cotangent, so the zero second derivative costs nothing. Torch's own fills
    a tensor with zeros and adds it.
    """

    reads_inputs = False
    reads_output = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        """Compute $max(x, 0)$."""
        return torch.relu(x)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor | None) -> Tensor | None:
        """Keep the cotangent where the output is positive."""
        return None if cotangent is None else where_positive(cotangent, ctx.saved_tensors[0])

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        """Keep the tangent where the input is positive."""
        return where_positive(tangent, ctx.saved_tensors[0])

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int, ...], x: Tensor) -> tuple[Tensor, int]:
        """Apply the elementwise function to the whole batch."""
        return ReLU.call(x), in_dims[0]


def where_positive(vector: Tensor, mask: Tensor) -> Tensor:
    """Return `vector` where `mask` is positive or NaN, and zero elsewhere; differentiable in `vector` alone."""
    return torch.ops.aten.threshold_backward(vector, mask.detach(), 0)


class Masked(ElementwiseFunction):
    """A tensor where a boolean mask is set, and zero elsewhere. Saves the mask."""

    @staticmethod
    def forward(vector: Tensor, mask: Tensor) -> Tensor:
        """Copy the elements where the mask is set."""
        if vector.shape == mask.shape and fused.takes(vector, mask=mask):
            return fused.masked(vector, mask)
        return where_positive(vector, mask.to(vector.dtype))

    @staticmethod
    def residuals(inputs: Sequence[Any], output: Any) -> Sequence[Any]:
        """Return the mask."""
        del output
        return inputs[1:]

    @staticmethod
    def scaled_slope(vector: Tensor, index: int, *residuals: Any) -> Tensor:
        """Mask the tangent or cotangent."""
        return Masked.call(vector, *residuals)


class MaskedReLU(AnyOrderFunction):
    """$max(x, 0)$ and a mask that is set where x is positive or NaN. Saves the mask, not the output."""

    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the value and its mask."""
        return fused.add_relu(x) if fused.takes(x) else (torch.relu(x), (x <= 0).logical_not())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Save the mask."""
        mask = output[1]
        ctx.mark_non_differentiable(mask)
        ctx.save_for_backward(mask)
        ctx.save_for_forward(mask)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor | None, _: Any = None) -> Tensor | None:
        """Keep the cotangent where the mask is set."""
        return None if cotangent is None else Masked.call(cotangent, ctx.saved_tensors[0])

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, tangent: Tensor) -> Any:
        """Keep the tangent where the mask is set."""
        return Masked.call(tangent, ctx.saved_tensors[0]), None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int, ...], x: Tensor) -> Any:
        """Apply the elementwise function to the whole batch."""
        return MaskedReLU.call(x), (in_dims[0], in_dims[0])


class ClippedReLU(SavingFunction):
    """The Function behind `clipped_relu`. Saves its output, which is detached in backward as in `ReLU`."""

    reads_inputs = False
    reads_output = True

    @staticmethod
    def forward(x: Tensor, maximum: float) -> Tensor:
        """Compute $min(max(x, 0), c)$."""
        return x.clamp(0.0, maximum)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor | None) -> tuple[Tensor | None, None]:
        """Keep the cotangent where the output is between the bounds."""
        if cotangent is None:
            return None, None
        return _where_between(cotangent, ctx.saved_tensors[0], *ctx.rest), None

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        """Keep the tangent where the clipped input is between the bounds."""
        return _where_between(tangent, ctx.saved_tensors[0].clamp(0, *ctx.rest), *ctx.rest)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int, None], x: Tensor, maximum: float) -> tuple[Tensor, int]:
        """Apply the elementwise function to the whole batch."""
        return ClippedReLU.call(x, maximum), in_dims[0]


def _where_between(vector: Tensor, output: Tensor, maximum: float) -> Tensor:
    output = output.detach()
    if output.dtype in (torch.float32, torch.float64):
        return torch.ops.aten.hardtanh_backward(vector, output, 0.0, maximum)
    # The kernel compares in float32, where a maximum that half precision rounds down would count as an inner point.
    return torch.where((output <= 0) | (output >= maximum), 0, vector)


class Softplus(ElementwiseFunction):
    """The Function behind `softplus`. Saves its inputs."""

    @staticmethod
    def forward(x: Tensor, beta: Any, threshold: float | None) -> Tensor:
        """Compute $log(1 + e^z) / β$ with $z = βx$."""
        z = beta * x
        y = -F.logsigmoid(-z) / beta
        return y if threshold is None else torch.where(z > threshold, x, y)

    @staticmethod
    def slope(index: int, x: Tensor, beta: Any, threshold: float | None) -> Tensor:
        """Compute $σ(z)$ for x, and minus the entropy $log(1 + e^z) - z σ(z)$ over $β^2$ for β."""
        z = beta * x
        linear, y = (1, Logistic.call(z)) if index == 0 else (0, -BernoulliEntropy.call(z) / beta / beta)
        return y if threshold is None else torch.where(z > threshold, linear, y)


@overridable
def relu(x: Tensor) -> Tensor:
    r"""Rectifier, $\max(x, 0)$.

    The derivative is 0 at $x = 0$, as in torch. The second derivative is 0 and costs nothing.

    Args:
        x: Floating-point tensor of any shape.

    Returns:
        Tensor of the same shape.

    Raises:
        InputError: If `x` is not a floating-point tensor.

    Example:
        >>> import torch
        >>> relu(torch.tensor([-1.0, 0.0, 1.0]))
        tensor([0., 0., 1.])

    Source: V. Nair & G. Hinton, "Rectified linear units improve restricted Boltzmann machines", 2010.
    """
    require_floating("relu", x=x)
    return ReLU.call(x)


@overridable
def clipped_relu(x: Tensor, max: float = 6.0) -> Tensor:
    r"""Rectifier with a ceiling, $\min(\max(x, 0), c)$ with $c$ = `max`.

    The derivative is 1 inside $(0, c)$, and 0 outside and at both kinks, as for torch's `hardtanh`. The second
    derivative is 0 and costs nothing.

    Args:
        x: Floating-point tensor of any shape.
        max: Positive number; 6 by default, as for torch's `relu6`.

    Returns:
        Tensor of the same shape.

    Raises:
        InputError: If an argument is invalid.

    Example:
        >>> import torch
        >>> clipped_relu(torch.tensor([-1.0, 3.0, 8.0]))
        tensor([0., 3., 6.])

    Source: A. Hannun et al., "Deep Speech: scaling up end-to-end speech recognition", 2014, section 2.
    """
    require_floating("clipped_relu", x=x)
    require_number("clipped_relu", "max", max, positive=True)
    return ClippedReLU.call(x, max)


@overridable
def softplus(x: Tensor, beta: Tensor | float = 1.0, threshold: float | None = None) -> Tensor:
    r"""Smooth rectifier, $\frac{1}{\beta} \log(1 + e^{\beta x})$.

    No threshold is needed for stability. With a threshold, the function is $x$ where $\beta x$ exceeds it, as in torch,
    whose default is 20. There, the derivative is 1 and all others, also those of β, are 0, an error of $e^{-20}$ at the
    border.

    Args:
        x: Floating-point tensor of any shape.
        beta: Number other than zero, or floating-point tensor that broadcasts with `x` and may require a gradient.
        threshold: Number, or None.

    Returns:
        Tensor of the broadcast shape.

    Raises:
        InputError: If an argument is invalid.

    Example:
        >>> import torch
        >>> softplus(torch.tensor([-50.0, 0.0, 50.0]))
        tensor([1.9287e-22, 6.9315e-01, 5.0000e+01])

    Source: C. Dugas et al., "Incorporating second-order functional knowledge for better option pricing", 2001.
    """
    require_floating("softplus", x=x)
    require_number_or_floating("softplus", beta=beta)
    require_broadcastable("softplus", x=x, beta=beta)
    if not isinstance(beta, Tensor) and beta == 0:
        raise InputError("softplus: beta: expected a number other than zero, got 0; it divides the result.")
    if threshold is not None and not (is_number(threshold) and not math.isnan(threshold)):
        raise InputError(f"softplus: threshold: expected a number or None, got {threshold!r}.")
    return Softplus.call(x, beta, threshold)
