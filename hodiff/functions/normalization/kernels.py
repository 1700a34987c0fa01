"""Fused kernels of normalizations: torch's for values and gradients, hodiff's for the gradients' pullback."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hodiff.functions.normalization.standardization import StatisticsLayout, reduced, wide
from hodiff.kernels import fused
from hodiff.torch_internals.operators import normalized_by_batches
from hodiff.torch_internals.tensors import is_zero_without_memory

_aten = torch.ops.aten


def value_kernel(x: Tensor, weight: Tensor | None, bias: Tensor | None, layout: StatisticsLayout) -> tuple[Tensor, ...]:
    r"""Return value, mean and $1 / \sqrt{\operatorname{var} + \varepsilon}$; channels add the unbiased variance."""
    if layout.kind == "trailing":
        return torch.native_layer_norm(x, x.shape[-layout.size :], weight, bias, layout.eps)
    if layout.kind == "groups":
        samples, _, places = sizes = _sizes(x)
        if not places:  # later versions of torch reject it
            return torch.empty_like(x), *x.new_zeros(2, samples, layout.size)
        return torch.native_group_norm(_dense(x), _dense(weight), _dense(bias), *sizes, layout.size, layout.eps)
    # The kernel updates a running variance; with momentum 1, that is the new variance.
    dtype = layout.parameter_dtype
    mean, variance = (torch.zeros(x.shape[1], dtype=dtype, device=x.device) for _ in range(2))
    # For 16-bit inputs, the kernel infers from the weight whether parameters and statistics are float32, as torch does.
    return (
        *normalized_by_batches(x, _dense(weight), _dense(bias), mean, variance, True, 1.0, layout.eps),
        variance,
    )


def gradient_kernel(
    cotangent: Tensor,
    x: Tensor,
    weight: Tensor | None,
    layout: StatisticsLayout,
    wanted: tuple[bool, ...],
    *statistics: Tensor,
) -> tuple[Tensor, ...]:
    """Compute the wanted gradients of input, weight and bias."""
    mean, rstd = statistics[:2]
    mask = list(wanted)
    if layout.kind == "trailing":
        # The value of the bias is irrelevant: the kernel checks only whether there is one.
        shape = x.shape[-layout.size :]
        bias = weight if weight is not None else x.new_empty(shape)
        found = _aten.native_layer_norm_backward.default(cotangent, x, shape, mean, rstd, weight, bias, mask)
    elif layout.kind == "groups" and not _sizes(x)[2]:
        found = (torch.empty_like(x), *x.new_zeros(2, x.shape[1], dtype=layout.parameter_dtype))
    elif layout.kind == "groups":
        # Without a weight, the kernel supports no bias.
        bias_alone = weight is None and wanted[2]
        mask[2] = wanted[2] and not bias_alone
        found = _aten.native_group_norm_backward.default(
            _dense(cotangent), _dense(x), mean, rstd, _dense(weight), *_sizes(x), layout.size, mask
        )
        if bias_alone:
            found = (*found[:2], reduced(wide(cotangent), layout).to(layout.parameter_dtype))
    else:
        found = _aten.native_batch_norm_backward.default(
            cotangent, x, _dense(weight), None, None, mean, rstd, True, layout.eps, mask
        )
    return tuple(each for each, is_wanted in zip(found, wanted, strict=True) if is_wanted)


def curvature_kernel(
    cotangent: Tensor,
    x: Tensor,
    weight: Tensor | None,
    u: Tensor,
    a: Tensor | None,
    c: Tensor | None,
    layout: StatisticsLayout,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Pull the cotangents u, a and c of the gradients back in one pass; None if no kernel supports them.

    Args:
        cotangent: The cotangent from which the gradients were computed.
        x: The input.
        weight: The weight, or None.
        u: Cotangent of the gradient of the input.
        a: Cotangent of the gradient of the weight, or None.
        c: Cotangent of the gradient of the bias, or None.
        layout: Layout of the statistics.

    Returns:
        The cotangents of `cotangent`, `x` and the weight.
    """
    # A recorded pullback is differentiated, which requires the formulas.
    if (
        layout.kind != "trailing"
        or torch.is_grad_enabled()
        or not x.numel()
        or not cotangent.shape == x.shape == u.shape
    ):
        return None
    if not fused.takes(cotangent, x, u, *(each for each in (weight, a, c) if each is not None)):
        return None
    shape = x.shape[-layout.size :]
    columns = shape.numel()
    rows = [each.view(-1, columns) for each in (x, cotangent, u)]
    parameters = [
        x.new_full((columns,), default) if each is None else each.view(columns)
        for each, default in ((weight, 1.0), (a, 0.0), (c, 0.0))
    ]
    by_g, by_x, by_w = fused.normalization_curvature(*rows, *parameters, eps=layout.eps, centered=layout.centered)
    return by_g.view(x.shape), by_x.view(x.shape), by_w.view(shape)


def _dense(x: Any) -> Any:
    """Copy a tensor to contiguous memory, for kernels that ignore strides."""
    if x is None:
        return None
    # Forward mode passes symbolic zeros, which have no memory that the kernel could read.
    if is_zero_without_memory(x):
        return x.clone()
    return x.contiguous()


def _sizes(x: Tensor) -> tuple[int, int, int]:
    spatial = 1
    for size in x.shape[2:]:
        spatial *= size
    return x.shape[0], x.shape[1], spatial
