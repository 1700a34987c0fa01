"""Normalizations with torch's signatures and correct derivatives of every order, by every route."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hodiff.common.options import is_int, require_bool, require_number
from hodiff.common.overriding import overridable
from hodiff.errors import InputError
from hodiff.functions.normalization.normalization_arguments import (
    require_channels,
    require_eps,
    require_parameters,
    require_running,
    require_several,
)
from hodiff.functions.normalization.normalization_function import Normalization
from hodiff.functions.normalization.normalization_function import NormalizationGradient as NormalizationGradient
from hodiff.functions.normalization.standardization import StatisticsLayout, aligned, wide
from hodiff.rules.any_order import AnyOrderFunction
from hodiff.rules.arguments import require_floating


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
                "batch_norm: running statistics: expected statistics for each element of the vmap batch, got "
                "statistics for all; stack them and map over them, or pass None."
            )
        new = new if new_dim is None else new.movedim(new_dim, 0)
        return _RunningUpdate.apply(running.movedim(running_dim, 0), new, momentum), None


@overridable
def layer_norm(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    r"""Layer normalization, $y = (x - m) / \sqrt{v + \varepsilon} \cdot w + b$ with statistics of each sample.

    Args:
        x: Floating-point tensor (..., *normalized_shape).
        normalized_shape: Sizes of the trailing dimensions that share statistics.
        weight: Tensor of shape `normalized_shape`, of the dtype of `x` (or float32 where that has 16 bits), or None.
        bias: Like `weight`.
        eps: Added to the variance.

    Returns:
        Tensor of the shape and dtype of `x`.

    Raises:
        InputError: If shapes or dtypes do not fit.

    Example:
        >>> import torch
        >>> layer_norm(torch.tensor([1.0, 2.0, 3.0]), (3,))
        tensor([-1.2247,  0.0000,  1.2247])

    Source: J. L. Ba, J. R. Kiros & G. E. Hinton, "Layer normalization", 2016, equation 4.
    """
    return _trailing("layer_norm", x, normalized_shape, weight, bias, eps, centered=True)


@overridable
def rms_norm(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    r"""Root-mean-square normalization, $y = x / \sqrt{m(x^2) + \varepsilon} \cdot w$ with the mean m of each sample.

    Args:
        x: Floating-point tensor (..., *normalized_shape).
        normalized_shape: Sizes of the trailing dimensions that share the mean.
        weight: Tensor of shape `normalized_shape`, of the dtype of `x` (or float32 where that has 16 bits), or None.
        eps: Added to the mean square; by default the machine epsilon of the dtype that computes (float32 for 16 bits).

    Returns:
        Tensor of the shape and dtype of `x`.

    Raises:
        InputError: If shapes or dtypes do not fit.

    Example:
        >>> import torch
        >>> rms_norm(torch.tensor([3.0, 4.0]), (2,))
        tensor([0.8485, 1.1314])

    Source: B. Zhang & R. Sennrich, "Root mean square layer normalization", 2019, equation 4.
    """
    require_floating("rms_norm", x=x)
    if eps is None:
        eps = torch.finfo(torch.float64 if x.dtype == torch.float64 else torch.float32).eps
    return _trailing("rms_norm", x, normalized_shape, weight, None, eps, centered=False)


@overridable
def group_norm(
    x: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    r"""Group normalization, $y = (x - m) / \sqrt{v + \varepsilon} \cdot w + b$ with statistics of channel groups.

    Args:
        x: Floating-point tensor (N, C, ...).
        num_groups: Number of groups, which divides C.
        weight: Tensor (C,), of the dtype of `x` (or float32 where that has 16 bits), or None.
        bias: Like `weight`.
        eps: Added to the variance.

    Returns:
        Tensor of the shape and dtype of `x`.

    Raises:
        InputError: If shapes or dtypes do not fit.

    Example:
        >>> import torch
        >>> group_norm(torch.tensor([[1.0, 3.0, 10.0, 30.0]]), 2)
        tensor([[-1.0000,  1.0000, -1.0000,  1.0000]])

    Source: Y. Wu & K. He, "Group normalization", 2018, equations 1, 2 and 7.
    """
    require_channels("group_norm", x, weight, bias, eps)
    if not is_int(num_groups) or num_groups < 1 or x.shape[1] % num_groups:
        raise InputError(
            f"group_norm: num_groups: expected an int that divides the {x.shape[1]} channels of x, got {num_groups!r}."
        )
    return _normalization("groups", num_groups, x, weight, bias, eps)[0]


@overridable
def instance_norm(
    x: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    r"""Instance normalization, $y = (x - m) / \sqrt{v + \varepsilon} \cdot w + b$ for each channel of each sample.

    Args:
        x: Floating-point tensor (N, C, ...).
        running_mean: Tensor (C,), updated in place by the mean over samples of the instances' means, or None.
        running_var: Tensor (C,), updated in place by the mean of the instances' unbiased variances, or None.
        weight: Tensor (C,), of the dtype of `x` (or float32 where that has 16 bits), or None.
        bias: Like `weight`.
        use_input_stats: Whether to normalize by the input's statistics; else by the running statistics.
        momentum: Share of the new statistics in the running statistics.
        eps: Added to the variance.

    Returns:
        Tensor of the shape and dtype of `x`.

    Raises:
        InputError: If shapes or dtypes do not fit, or statistics are missing.

    Example:
        >>> import torch
        >>> instance_norm(torch.tensor([[[1.0, 3.0], [10.0, 30.0]]]))
        tensor([[[-1.0000,  1.0000],
                 [-1.0000,  1.0000]]])

    Source: D. Ulyanov, A. Vedaldi & V. Lempitsky, "Instance normalization", 2016, equation 3.
    """
    require_channels("instance_norm", x, weight, bias, eps)
    require_bool("instance_norm", "use_input_stats", use_input_stats)
    require_number("instance_norm", "momentum", momentum)
    require_running("instance_norm", x, running_mean, running_var, required=not use_input_stats)
    if not use_input_stats:
        return by_running_statistics(x, running_mean, running_var, weight, bias, eps)
    require_several("instance_norm", x, math.prod(x.shape[2:]), "instance")
    if running_mean is not None or running_var is not None:
        variance, mean = torch.var_mean(wide(x.detach()), list(range(2, x.dim())))
        update_running(running_mean, mean.mean(0), momentum)
        update_running(running_var, variance.mean(0), momentum)
    return _normalization("groups", x.shape[1], x, weight, bias, eps)[0]


@overridable
def batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    r"""Batch normalization, $y = (x - m) / \sqrt{v + \varepsilon} \cdot w + b$ with statistics of each channel.

    In training, m and v are statistics of the input and are differentiated. The running statistics are updated in
    place, with the unbiased variance, to
    $(1 - \text{momentum}) \cdot \text{running} + \text{momentum} \cdot \text{new}$. In evaluation, m and v are the
    running statistics, which get a gradient if they require one.

    Args:
        x: Floating-point tensor (N, C, ...).
        running_mean: Tensor (C,), or None in training.
        running_var: Tensor (C,), or None in training.
        weight: Tensor (C,), of the dtype of `x` (or float32 where that has 16 bits), or None.
        bias: Like `weight`.
        training: Whether to normalize by the statistics of the input.
        momentum: Share of the new statistics in the running statistics.
        eps: Added to the variance.

    Returns:
        Tensor of the shape and dtype of `x`.

    Raises:
        InputError: If shapes or dtypes do not fit, or statistics are missing.

    Example:
        >>> import torch
        >>> batch_norm(torch.tensor([[1.0, 10.0], [3.0, 30.0]]), None, None, training=True)
        tensor([[-1.0000, -1.0000],
                [ 1.0000,  1.0000]])

    Source: S. Ioffe & C. Szegedy, "Batch normalization", 2015, algorithm 1.
    """
    require_channels("batch_norm", x, weight, bias, eps)
    require_bool("batch_norm", "training", training)
    require_number("batch_norm", "momentum", momentum)
    require_running("batch_norm", x, running_mean, running_var, required=not training)
    if not training:
        return by_running_statistics(x, running_mean, running_var, weight, bias, eps)
    require_several("batch_norm", x, x.shape[0] * math.prod(x.shape[2:]), "channel")
    y, *statistics = _normalization("channels", x.shape[1], x, weight, bias, eps)
    if running_mean is not None or running_var is not None:
        if statistics:
            mean, _, variance = (each.detach() for each in statistics)
        else:
            variance, mean = torch.var_mean(wide(x.detach()), [0, *range(2, x.dim())])
        update_running(running_mean, mean, momentum)
        update_running(running_var, variance, momentum)
    return y


def _trailing(
    function: str,
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    centered: bool,
) -> Tensor:
    require_floating(function, x=x)
    shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    if not shape or x.shape[-len(shape) :] != shape:
        raise InputError(
            f"{function}: normalized_shape: expected the trailing sizes of x {tuple(x.shape)}, got {shape}."
        )
    require_parameters(function, x, shape, weight, bias)
    require_eps(function, eps)
    return _normalization("trailing", len(shape), x, weight, bias, eps, centered)[0]


def _normalization(
    kind: str, size: int, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, centered: bool = True
) -> Any:
    parameter = weight if weight is not None else bias
    dtype = x.dtype if parameter is None else parameter.dtype
    return Normalization.call(x, weight, bias, StatisticsLayout(kind, size, x.dim(), float(eps), centered, dtype))
