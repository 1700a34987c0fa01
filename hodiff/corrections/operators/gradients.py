"""Rules for operators that compute gradients in captured graphs, for further derivatives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hodiff.corrections.declining import UNNEEDED
from hodiff.corrections.operators.calls import calls
from hodiff.corrections.operators.renamed import REDUCTIONS
from hodiff.functions.normalization import formulas
from hodiff.functions.normalization.formulas import StatisticsLayout, wide


def _of_normalization(
    cotangent: Tensor, x: Tensor, weight: Tensor | None, layout: StatisticsLayout, wanted: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Return gradients with respect to input, weight and bias; None if not wanted."""
    found = iter(formulas.gradient(cotangent, x, weight, layout, tuple(wanted)))
    return tuple(next(found) if want else None for want in wanted)


@calls(torch.native_layer_norm, "native_layer_norm_backward")
def _native_layer_norm_backward(
    cotangent: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    wanted: Sequence[bool],
) -> Any:
    del mean, bias
    if not input.is_floating_point() or not input.numel():
        return UNNEEDED
    dims = tuple(range(-len(normalized_shape), 0))
    # The operator does not receive epsilon, but the statistics contain it.
    eps: Any = (rstd.pow(-2) - wide(input).var(dims, correction=0, keepdim=True)).detach()
    dtype = input.dtype if weight is None else weight.dtype
    return _of_normalization(
        cotangent, input, weight, StatisticsLayout("trailing", len(dims), input.dim(), eps, True, dtype), wanted
    )


@calls(torch.native_batch_norm, "native_batch_norm_backward", "batch_norm_backward")
def _native_batch_norm_backward(
    cotangent: Tensor,
    input: Tensor,
    weight: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    save_mean: Tensor | None,
    save_invstd: Tensor | None,
    training: bool,
    eps: float,
    wanted: Sequence[bool],
    *_: Tensor,
) -> Any:
    del running_mean, running_var, save_mean, save_invstd
    if not training or not input.is_floating_point() or not input.numel():
        return UNNEEDED
    dtype = input.dtype if weight is None else weight.dtype
    layout = StatisticsLayout("channels", input.shape[1], input.dim(), eps, True, dtype)
    return _of_normalization(cotangent, input, weight, layout, wanted)


@calls(F.mse_loss, "mse_loss_backward")
def _mse_loss_backward(cotangent: Tensor, input: Tensor, target: Tensor, reduction: int) -> Any:
    if not input.is_floating_point() or input.shape != target.shape:
        return UNNEEDED
    difference = input - target
    share = 2 / difference.numel() if REDUCTIONS[reduction] == "mean" and difference.numel() else 2
    return cotangent * difference * share
