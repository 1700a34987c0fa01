"""Rules for piecewise linear activations and GLU; smooth activations are in `tails.py`."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hodiff.corrections.mechanism.declining import INVALID, UNNEEDED
from hodiff.corrections.mechanism.in_place_variants import in_place
from hodiff.corrections.mechanism.registry import register
from hodiff.corrections.rules.elementwise.tails import sigmoid
from hodiff.routes import FORWARD_INSIDE, ROUTES
from hodiff.rules.elementwise import ElementwiseFunction
from hodiff.torch_internals.operators import glu, hardsigmoid
from hodiff.torch_operators.table import forms_of


@register(
    torch.relu,
    Tensor.relu,
    F.relu,
    kind="slow",
    reason="the second derivative is zero, but is computed and added",
    devices=("cpu",),
)
def _relu(input: Tensor, inplace: bool = False) -> Any:
    if inplace or not input.is_floating_point():
        return UNNEEDED
    # One operator with the same values. Torch differentiates it in the first argument alone: the mask is a constant.
    return torch.ops.aten.threshold_backward.default(input, input.detach(), 0)


def _is_identity(input: Any, lambd: Any = 0.5) -> bool:
    return lambd == 0 and input.is_floating_point()


_shrinks_nothing = partial(
    register,
    routes=ROUTES,
    reason="with lambd=0 it is the identity, but torch's derivative at 0 is 0",
    reference="the identity",
    covers=_is_identity,
)


@_shrinks_nothing(F.softshrink)
@_shrinks_nothing(*forms_of("hardshrink"))
def _shrink(input: Tensor, lambd: float = 0.5) -> Tensor:
    del lambd
    return input.clone()


class HardSigmoid(ElementwiseFunction):
    """$min(max(x/6 + 1/2, 0), 1)$. Saves its input; as in torch, the slope is 0 at the two kinks."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        """Use torch's kernel, or a formula under a compiler, as the kernel has no second derivative to trace."""
        if torch.compiler.is_compiling():
            return torch.where(_sloped(x), x + 3, (x.detach() + 3).clamp(0, 6)) / 6
        return F.hardsigmoid(x)

    @staticmethod
    def slope(index: int, x: Tensor) -> Tensor:
        """1/6 between the kinks."""
        return HardSigmoidSlope.call(x)


class HardSigmoidSlope(ElementwiseFunction):
    """The derivative of the hard sigmoid, whose own is 0. Saves its input."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        """Compute 1/6 between the kinks and 0 elsewhere."""
        return _sloped(x).to(x.dtype) / 6

    @staticmethod
    def slope(index: int, x: Tensor) -> float:
        """Zero."""
        return 0.0


def _sloped(x: Tensor) -> Tensor:
    return (x > -3) & (x < 3)


@register(
    F.hardsigmoid,
    hardsigmoid,
    name="torch.nn.functional.hardsigmoid",
    kind="missing",
    routes=ROUTES,
    reason="the second derivative, which is zero, is not implemented",
    reference="Howard et al. (2019), section 5.2",
)
def _hardsigmoid(input: Tensor, inplace: bool = False) -> Any:
    if not input.is_floating_point():
        return UNNEEDED
    return input.copy_(HardSigmoid.call(input.clone())) if inplace else HardSigmoid.call(input)


@register(
    F.glu,
    glu,
    name="torch.nn.functional.glu",
    kind="missing",
    routes=FORWARD_INSIDE,
    reason="the forward rule has no derivative",
    reference="Dauphin et al. (2017), eq. 1",
)
def _glu(input: Tensor, dim: int = -1) -> Any:
    if not input.is_floating_point():
        return UNNEEDED
    if input.shape[dim] % 2:
        return INVALID
    half = input.shape[dim] // 2
    return input.narrow(dim, 0, half) * sigmoid(input.narrow(dim, half, half))


@register(
    *forms_of("prelu"),
    routes=ROUTES[1:],
    reason="forward and reverse mode have different slopes at 0",
    reference="He et al. (2015), eq. 1",
)
def _prelu(input: Tensor, weight: Tensor) -> Any:
    if not input.is_floating_point():
        return UNNEEDED
    channels = input.shape[1] if input.dim() > 1 else 1
    if weight.numel() not in (1, channels) or weight.dim() > 1:
        return INVALID
    slopes = weight if weight.numel() == 1 else weight.reshape(-1, *[1] * (input.dim() - 2))
    return torch.where(input > 0, input, slopes * input)


_batched = partial(
    register,
    kind="missing",
    routes=ROUTES,
    reason="no rule for batches of tangents or cotangents, even in evaluation mode",
    reference="Xu et al. (2015), section 2.4",
)


@_batched(torch.rrelu)
def _rrelu(input: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False) -> Any:
    return UNNEEDED if training else F.leaky_relu(input, (lower + upper) / 2)


_rrelu_ = _batched(torch.rrelu_)(in_place(_rrelu))


@_batched(F.rrelu)
def _functional_rrelu(
    input: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, inplace: bool = False
) -> Any:
    return (_rrelu_ if inplace else _rrelu)(input, lower, upper, training)


def _has_rounded_alpha(input: Any, alpha: Any = 1.0, *_: Any, **__: Any) -> bool:
    del input
    return float(alpha) not in (1.0, 0.0)  # 0 is refused by torch


_rounds_alpha = partial(
    register,
    routes=ROUTES,
    reason="derivatives have the digits of float32, as torch rounds 1 / alpha, also for float64",
    reference="the derivative of torch's elu",
    covers=_has_rounded_alpha,
)


@_rounds_alpha(*forms_of("celu"))
def _celu(input: Tensor, alpha: float = 1.0, inplace: bool = False) -> Any:
    if not input.is_floating_point():
        return UNNEEDED
    source = input.clone() if inplace else input
    result = torch.ops.aten.elu.default(source, alpha, 1.0, 1.0 / alpha)
    return input.copy_(result) if inplace else result


_rounds_alpha(*forms_of("celu_"))(in_place(_celu))
