"""Quantizers with the derivatives of a smooth surrogate (straight-through estimators)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hodiff.common.options import require_bool, require_int
from hodiff.common.overriding import overridable
from hodiff.errors import InputError
from hodiff.functions.gradients.straight_through import straight_through
from hodiff.rules.arguments import (
    require_broadcastable,
    require_floating,
    require_number_or_floating,
    require_positive_or_floating,
)
from hodiff.rules.elementwise import ElementwiseFunction, clip

MAX_BITS = 16


def _identity(x: Tensor) -> Tensor:
    return x


def _clip(x: Tensor) -> Tensor:
    return clip(x, -1, 1)


def _sign(x: Tensor) -> Tensor:
    # torch.sign turns NaN into a number.
    return torch.where(x.isnan(), x, x.sign())


_sign_ste = straight_through(_sign, _identity, name="sign_ste")
_sign_clipped_ste = straight_through(_sign, _clip, name="sign_clipped_ste")
_round_ste = straight_through(torch.round, _identity, name="round_ste")
_floor_ste = straight_through(torch.floor, _identity, name="floor_ste")


@overridable
def sign_ste(x: Tensor) -> Tensor:
    r"""Sign, $\operatorname{sign}(x)$ with $\operatorname{sign}(0) = 0$ as in torch, with the derivatives of $x$.

    Args:
        x: Floating-point tensor of any shape.

    Returns:
        Tensor of the same shape, of -1, 0 and 1.

    Raises:
        InputError: If `x` is not a floating-point tensor.

    Example:
        >>> import torch
        >>> x = torch.tensor([-0.3, 0.0, 2.0], requires_grad=True)
        >>> y = sign_ste(x)
        >>> y.detach(), torch.autograd.grad(y.sum(), x)[0]
        (tensor([-1.,  0.,  1.]), tensor([1., 1., 1.]))

    Source: Y. Bengio, N. Léonard & A. Courville, "Estimating or propagating gradients through stochastic neurons for
    conditional computation", 2013, section 4.
    """
    require_floating("sign_ste", x=x)
    return _sign_ste(x)


@overridable
def sign_clipped_ste(x: Tensor) -> Tensor:
    r"""Sign, as in `sign_ste`, with the derivatives of $\operatorname{clamp}(x, -1, 1)$.

    The first derivative is 1 for $|x| \le 1$, ends included, and 0 outside; higher derivatives are 0.

    Args:
        x: Floating-point tensor of any shape.

    Returns:
        Tensor of the same shape, of -1, 0 and 1.

    Raises:
        InputError: If `x` is not a floating-point tensor.

    Example:
        >>> import torch
        >>> x = torch.tensor([-0.3, 1.0, 2.0], requires_grad=True)
        >>> y = sign_clipped_ste(x)
        >>> y.detach(), torch.autograd.grad(y.sum(), x)[0]
        (tensor([-1.,  1.,  1.]), tensor([1., 1., 0.]))

    Source: I. Hubara, M. Courbariaux, D. Soudry, R. El-Yaniv & Y. Bengio, "Binarized neural networks", 2016,
    equation 4.
    """
    require_floating("sign_clipped_ste", x=x)
    return _sign_clipped_ste(x)


@overridable
def round_ste(x: Tensor) -> Tensor:
    r"""Rounding to the nearest integer, halves to even, with the derivatives of $x$.

    Args:
        x: Floating-point tensor of any shape.

    Returns:
        Tensor of the same shape.

    Raises:
        InputError: If `x` is not a floating-point tensor.

    Example:
        >>> import torch
        >>> x = torch.tensor([0.5, 1.2, 1.5], requires_grad=True)
        >>> y = round_ste(x)
        >>> y.detach(), torch.autograd.grad(y.sum(), x)[0]
        (tensor([0., 1., 2.]), tensor([1., 1., 1.]))

    Source: Y. Bengio, N. Léonard & A. Courville, "Estimating or propagating gradients through stochastic neurons for
    conditional computation", 2013, section 4.
    """
    require_floating("round_ste", x=x)
    return _round_ste(x)


@overridable
def floor_ste(x: Tensor) -> Tensor:
    r"""The largest integer that is not greater, $\lfloor x \rfloor$, with the derivatives of $x$.

    Args:
        x: Floating-point tensor of any shape.

    Returns:
        Tensor of the same shape.

    Raises:
        InputError: If `x` is not a floating-point tensor.

    Example:
        >>> import torch
        >>> x = torch.tensor([-0.5, 1.2], requires_grad=True)
        >>> y = floor_ste(x)
        >>> y.detach(), torch.autograd.grad(y.sum(), x)[0]
        (tensor([-1.,  1.]), tensor([1., 1.]))

    Source: Y. Bengio, N. Léonard & A. Courville, "Estimating or propagating gradients through stochastic neurons for
    conditional computation", 2013, section 4.
    """
    require_floating("floor_ste", x=x)
    return _floor_ste(x)


class QuantizeSTE(ElementwiseFunction):
    """The Function behind `quantize_ste`. Saves its inputs.

    With straight-through rounding, the result is jointly linear in x, scale and offset wherever it is smooth. So the
    slopes are constants, and every higher derivative is zero.
    """

    @staticmethod
    def forward(x: Tensor, scale: Any, offset: Any, lowest: int, highest: int) -> Tensor:
        r"""Compute $s \operatorname{round}(\operatorname{clamp}((x - β) / s, q_-, q_+)) + β$."""
        return _round_ste(((x - offset) / scale).clamp(lowest, highest)) * scale + offset

    @staticmethod
    def slope(index: int, x: Tensor, scale: Any, offset: Any, lowest: int, highest: int) -> Tensor:
        """Slopes of x, scale and offset: 1, the rounding error, 0 on the grid; 0, the last integer, 1 outside."""
        with torch.no_grad():
            ratio = (_detached(x) - _detached(offset)) / _detached(scale)
            clipped = ratio.clamp(lowest, highest)
            inside = ratio == clipped
            if index == 0:
                return inside.to(ratio.dtype)
            if index == 1:
                return torch.where(inside, clipped.round() - clipped, clipped)
            return (~inside).to(ratio.dtype)


@overridable
def quantize_ste(
    x: Tensor,
    bits: int,
    *,
    scale: Tensor | float | None = None,
    offset: Tensor | float = 0.0,
    low: Tensor | float | None = None,
    high: Tensor | float | None = None,
    symmetric: bool = True,
) -> Tensor:
    r"""Uniform quantization to $2^b$ levels, with straight-through rounding and a learnable grid.

    $$ y = s \operatorname{round}\bigl(\operatorname{clamp}((x - \beta) / s,\; q_-, q_+)\bigr) + \beta $$

    The integers run from $q_- = -2^{b-1}$ to $q_+ = 2^{b-1} - 1$ if `symmetric`, else from 0 to $2^b - 1$. Rounding has
    derivative 1. So the derivative with respect to $x$ is 1 on the grid and 0 outside; with respect to the step size
    $s$, it is $\operatorname{round}(r) - r$ with $r = (x - \beta) / s$ on the grid and $q_\pm$ outside; with respect to
    the offset $\beta$, it is 0 on the grid and 1 outside. Second derivatives are zero. The ends belong to the grid.

    The grid is given by its step size or by its range. Without either, it spans the values of `x`, whose extremes are
    treated as constants. A range sets $s = h / q_+$ if `symmetric`; else $s = (h - l) / (2^b - 1)$ and
    $\beta = s \operatorname{round}(l / s)$, so that zero is on the grid.

    Args:
        x: Floating-point tensor of any shape.
        bits: Number of bits, from 2 (1 if not `symmetric`) to 16.
        scale: Step size $s > 0$: number, or floating-point tensor that broadcasts with `x` (one number for all, or one
            per channel) and may require a gradient.
        offset: $\beta$, a number or tensor like `scale`; only with `scale`.
        low: Lower end $l \le 0$ of the range, a number or tensor; only with `high` and if not `symmetric`.
        high: Upper end $h > l$ of the range, a number or tensor; not with `scale`.
        symmetric: Whether the integers lie around zero.

    Returns:
        Tensor of the broadcast shape.

    Raises:
        InputError: If an argument is invalid or conflicts with another.

    Example:
        >>> import torch
        >>> x = torch.tensor([-2.0, -0.3, 0.4, 0.9])
        >>> quantize_ste(x, 3, scale=0.25)
        tensor([-1.0000, -0.2500,  0.5000,  0.7500])
        >>> torch.func.grad(lambda s: quantize_ste(x, 3, scale=s).sum())(torch.tensor(0.25))
        tensor(-0.4000)

    Source: S. K. Esser, J. L. McKinstry, D. Bablani, R. Appuswamy & D. S. Modha, "Learned step size quantization",
    2020, equations 1 to 3; for the offset, Y. Bhalgat et al., "LSQ+", 2020, section 3.2.
    """
    require_floating("quantize_ste", x=x)
    require_bool("quantize_ste", "symmetric", symmetric)
    lowest, highest = _integers(bits, symmetric)
    if scale is not None:
        if low is not None or high is not None:
            raise InputError("quantize_ste: scale: expected either scale or a range (low, high), got both.")
    elif not (isinstance(offset, (int, float)) and offset == 0):
        raise InputError(
            "quantize_ste: offset: expected scale together with offset, got no scale; a range defines its own offset."
        )
    else:
        scale, offset = _grid(x, low, high, lowest, highest, symmetric)
    require_number_or_floating("quantize_ste", offset=offset)
    require_positive_or_floating("quantize_ste", "scale", scale)
    require_broadcastable("quantize_ste", x=x, scale=scale, offset=offset)
    return QuantizeSTE.call(x, scale, offset, lowest, highest)


def _integers(bits: int, symmetric: bool) -> tuple[int, int]:
    least = 2 if symmetric else 1
    require_int(
        "quantize_ste", "bits", bits, least, MAX_BITS, remedy=f"with symmetric={symmetric} the least is {least}"
    )
    return (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if symmetric else (0, 2**bits - 1)


def _grid(x: Tensor, low: Any, high: Any, lowest: int, highest: int, symmetric: bool) -> tuple[Any, Any]:
    """Compute step size and offset from a range, or from the values of `x`."""
    if symmetric and low is not None:
        raise InputError("quantize_ste: low: expected no low with symmetric=True; pass symmetric=False.")
    if not symmetric and (low is None) != (high is None):
        raise InputError("quantize_ste: range: expected both low and high with symmetric=False, got one.")
    if high is None:
        low, high = _extent(x, symmetric, highest)
    if symmetric:
        require_number_or_floating("quantize_ste", high=high)
        _require_order(0, high)
        return high / highest, 0.0
    require_number_or_floating("quantize_ste", low=low, high=high)
    require_broadcastable("quantize_ste", x=x, low=low, high=high)
    _require_order(low, high)
    scale = (high - low) / (highest - lowest)
    ratio = low / scale
    return scale, scale * (_round_ste(ratio) if isinstance(ratio, Tensor) else round(ratio))


def _extent(x: Tensor, symmetric: bool, steps: int) -> tuple[Tensor, Tensor]:
    """The smallest range that holds zero and all values; its upper end is 1 if all values are zero."""
    numbers = x.detach()
    if symmetric:
        numbers = numbers.abs()
    # An appended zero also serves tensors without elements; ONNX has extremes along dimensions only.
    numbers = torch.cat([numbers.reshape(-1), numbers.new_zeros(1)])
    low, high = numbers.amin(0), numbers.amax(0)
    # For the smallest positive numbers, the step size would round to zero.
    limits = torch.finfo(x.dtype)
    least = low + steps * limits.tiny * limits.eps
    return low, torch.where(high > low, torch.maximum(high, least), torch.ones_like(high))


def _require_order(low: Any, high: Any) -> None:
    if not isinstance(low, Tensor) and not isinstance(high, Tensor) and not low < high:
        raise InputError(f"quantize_ste: range: expected low < high, got {low!r} and {high!r}.")


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value
