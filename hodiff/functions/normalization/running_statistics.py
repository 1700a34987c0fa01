"""Running statistics of normalizations: normalization by them, and their update."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hodiff.errors import InputError
from hodiff.functions.normalization.formulas import StatisticsLayout, aligned, wide
from hodiff.rules.any_order import AnyOrderFunction


def by_running_statistics(
    x: Tensor, mean: Any, variance: Any, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """Normalize channels of x (N, C, ...) by given statistics (C,), which may carry a gradient."""
    layout = StatisticsLayout("channels", x.shape[1], x.dim(), eps, True, x.dtype)
    scale = torch.rsqrt(wide(variance) + eps)
    scale = scale if weight is None else scale * weight
    shift = -mean * scale if bias is None else bias - mean * scale
    return (wide(x) * aligned(scale, layout) + aligned(shift, layout)).to(x.dtype)


def update_running(running: Tensor | None, new: Tensor, momentum: float) -> None:
    """Move running statistics towards new statistics by the share `momentum`, in place and without a graph."""
    if running is None:
        return
    if torch.compiler.is_compiling():
        running.copy_((1 - momentum) * running.detach() + momentum * new.detach().to(running.dtype))
    else:
        _RunningUpdate.apply(running.detach(), new.detach(), momentum)


class _RunningUpdate(AnyOrderFunction):
    """Updates a running statistic below all transforms of torch.func, as torch's batch_norm does; saves nothing."""

    @staticmethod
    def forward(running: Tensor, new: Tensor, momentum: float) -> Tensor:
        running.copy_((1 - momentum) * running + momentum * new.to(running.dtype))
        return running.new_zeros(())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        return None, None, None

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> None:
        return None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], running: Tensor, new: Tensor, momentum: float) -> Any:
        running_dim, new_dim, _ = in_dims
        if running_dim is None:
            raise InputError(
                "batch_norm: running statistics: expected one for each element of the batch of vmap, got one for all; "
                "stack them and map over them, or pass None."
            )
        new = new if new_dim is None else new.movedim(new_dim, 0)
        return _RunningUpdate.apply(running.movedim(running_dim, 0), new, momentum), None
