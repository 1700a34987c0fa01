"""Rules for normalizations, whose forward rules in torch are constants to a second derivative."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hodiff import functions
from hodiff.corrections.registry import register
from hodiff.routes import FORWARD_INSIDE

_constant = partial(
    register,
    kind="wrong",
    routes=FORWARD_INSIDE,
    reason="the forward rule is a constant to a second derivative, and the reverse rule to a third",
)


def _real(input: Any, *_: Any, **__: Any) -> bool:
    return isinstance(input, Tensor) and input.is_floating_point()


@_constant(torch.layer_norm, F.layer_norm, covers=_real, reference="Ba, Kiros & Hinton (2016), eq. 4")
def _layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    del cudnn_enable
    return functions.layer_norm(input, normalized_shape, weight, bias, eps)


@_constant(F.batch_norm, covers=_real, reference="Ioffe & Szegedy (2015), alg. 1")
def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    del cudnn_enabled
    return functions.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)


@_constant(F.instance_norm, covers=_real, reference="Ulyanov, Vedaldi & Lempitsky (2016), eq. 3")
def _instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    return functions.instance_norm(input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)
