"""Torch's fused kernels of normalizations: a value with its statistics, and the gradients from those."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hodiff.functions.normalization_formulas import Layout, reduced, wide

_aten = torch.ops.aten


def value_kernel(x: Tensor, weight: Tensor | None, bias: Tensor | None, layout: Layout) -> tuple[Tensor, ...]:
    r"""The value, mean and $1 / \sqrt{\operatorname{var} + \varepsilon}$; for channels also the unbiased variance."""
    if layout.kind == "trailing":
        return torch.native_layer_norm(x, x.shape[-layout.size :], weight, bias, layout.eps)
    if layout.kind == "groups":
        return torch.native_group_norm(_dense(x), _dense(weight), _dense(bias), *_sizes(x), layout.size, layout.eps)
    # The kernel mixes the variance into a running one, here with a share of 1.
    dtype = layout.parameter_dtype
    mean, variance = (torch.zeros(x.shape[1], dtype=dtype, device=x.device) for _ in range(2))
    # It tells parameters and statistics of float32 for 16-bit inputs by the weight, as torch does.
    return (
        *_aten._native_batch_norm_legit.default(x, weight, bias, mean, variance, True, 1.0, layout.eps),
        variance,
    )


def gradient_kernel(
    cotangent: Tensor, x: Tensor, weight: Tensor | None, layout: Layout, wanted: tuple[bool, ...], *statistics: Tensor
) -> tuple[Tensor, ...]:
    """Gradients by input, weight and bias, as far as wanted."""
    mean, rstd = statistics[:2]
    mask = list(wanted)
    if layout.kind == "trailing":
        # A bias of any value: the kernel looks only whether there is one.
        shape = x.shape[-layout.size :]
        bias = weight if weight is not None else x.new_empty(shape)
        found = _aten.native_layer_norm_backward.default(cotangent, x, shape, mean, rstd, weight, bias, mask)
    elif layout.kind == "groups":
        # Without a weight the kernel knows no bias.
        bias_alone = weight is None and wanted[2]
        mask[2] = wanted[2] and not bias_alone
        found = _aten.native_group_norm_backward.default(
            _dense(cotangent), _dense(x), mean, rstd, _dense(weight), *_sizes(x), layout.size, mask
        )
        if bias_alone:
            found = (*found[:2], reduced(wide(cotangent), layout).to(layout.parameter_dtype))
    else:
        found = _aten.native_batch_norm_backward.default(
            cotangent, x, weight, None, None, mean, rstd, True, layout.eps, mask
        )
    return tuple(each for each, is_wanted in zip(found, wanted, strict=True) if is_wanted)


def _dense(x: Any) -> Any:
    """What the kernel of groups can read: it looks at no strides."""
    if x is None:
        return None
    # Forward mode hands symbolic zeros on, whose memory it would read: they have none.
    if x._is_zerotensor():
        return x.clone()
    return x.contiguous()


def _sizes(x: Tensor) -> tuple[int, int, int]:
    spatial = 1
    for size in x.shape[2:]:
        spatial *= size
    return x.shape[0], x.shape[1], spatial
