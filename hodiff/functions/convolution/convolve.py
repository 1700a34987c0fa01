"""Convolutions with exact and lean derivatives of every order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hodiff.common.options import is_int
from hodiff.common.overriding import overridable
from hodiff.errors import InputError
from hodiff.functions.convolution.maps import Convolution, Geometry
from hodiff.rules.arguments import require_floating, require_one_dtype
from hodiff.rules.autocast import autocast_like_torch

Sizes = int | Sequence[int]


@overridable
def conv1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: str | Sizes = 0,
    dilation: Sizes = 1,
    groups: int = 1,
) -> Tensor:
    r"""Convolution over one spatial dimension, with the arguments of `torch.nn.functional.conv1d`.

    $$ y_{n,o,t} = b_o + \sum_{i,k} w_{o,i,k}\, x_{n,\,i,\,s t + d k - p} $$

    Args:
        input: Floating-point tensor (N, C, length) or (C, length).
        weight: Tensor (O, C / groups, kernel).
        bias: Tensor (O,), or None.
        stride: Step $s$ of the kernel.
        padding: Zeros $p$ on both sides, "valid" for none, or "same" for an output as long as the input.
        dilation: Distance $d$ of the kernel's elements.
        groups: Number of blocks of channels that are convolved separately.

    Returns:
        Tensor (N, O, length of the output), without N for an unbatched input.

    Raises:
        InputError: If an argument is invalid.

    Example:
        >>> import torch
        >>> conv1d(torch.arange(5.0).reshape(1, 1, 5), torch.tensor([[[-1.0, 0.0, 1.0]]]))
        tensor([[[2., 2., 2.]]])

    Source: V. Dumoulin & F. Visin, "A guide to convolution arithmetic for deep learning", 2016, sections 2 and 4.
    """
    return _convolve("conv1d", 1, input, weight, bias, stride, padding, dilation, groups)


@overridable
def conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: str | Sizes = 0,
    dilation: Sizes = 1,
    groups: int = 1,
) -> Tensor:
    r"""Convolution over two spatial dimensions, with the arguments of `torch.nn.functional.conv2d`.

    $$ y_{n,o,t} = b_o + \sum_{i,k} w_{o,i,k}\, x_{n,\,i,\,s t + d k - p} \quad (t, k \text{ pairs of indices}) $$

    Args:
        input: Floating-point tensor (N, C, height, width) or (C, height, width).
        weight: Tensor (O, C / groups, kernel height, kernel width).
        bias: Tensor (O,), or None.
        stride: Step $s$ of the kernel, for both dimensions or each.
        padding: Zeros $p$ on both sides, "valid" for none, or "same" for an output as large as the input.
        dilation: Distance $d$ of the kernel's elements.
        groups: Number of blocks of channels that are convolved separately.

    Returns:
        Tensor (N, O, height, width), without N for an unbatched input.

    Raises:
        InputError: If an argument is invalid.

    Example:
        >>> import torch
        >>> x = torch.arange(9.0).reshape(1, 1, 3, 3)
        >>> conv2d(x, torch.ones(1, 1, 2, 2))
        tensor([[[[ 8., 12.],
                  [20., 24.]]]])

    Source: V. Dumoulin & F. Visin, "A guide to convolution arithmetic for deep learning", 2016, sections 2 and 4.
    """
    return _convolve("conv2d", 2, input, weight, bias, stride, padding, dilation, groups)


@overridable
def conv3d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: str | Sizes = 0,
    dilation: Sizes = 1,
    groups: int = 1,
) -> Tensor:
    r"""Convolution over three spatial dimensions, with the arguments of `torch.nn.functional.conv3d`.

    $$ y_{n,o,t} = b_o + \sum_{i,k} w_{o,i,k}\, x_{n,\,i,\,s t + d k - p} \quad (t, k \text{ triples of indices}) $$

    Args:
        input: Floating-point tensor (N, C, depth, height, width) or (C, depth, height, width).
        weight: Tensor (O, C / groups, kernel depth, kernel height, kernel width).
        bias: Tensor (O,), or None.
        stride: Step $s$ of the kernel, for all dimensions or each.
        padding: Zeros $p$ on both sides, "valid" for none, or "same" for an output as large as the input.
        dilation: Distance $d$ of the kernel's elements.
        groups: Number of blocks of channels that are convolved separately.

    Returns:
        Tensor (N, O, depth, height, width), without N for an unbatched input.

    Raises:
        InputError: If an argument is invalid.

    Example:
        >>> import torch
        >>> conv3d(torch.ones(1, 1, 2, 2, 3), torch.ones(1, 1, 2, 2, 2))
        tensor([[[[[8., 8.]]]]])

    Source: V. Dumoulin & F. Visin, "A guide to convolution arithmetic for deep learning", 2016, sections 2 and 4.
    """
    return _convolve("conv3d", 3, input, weight, bias, stride, padding, dilation, groups)


def _convolve(
    name: str,
    rank: int,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sizes,
    padding: str | Sizes,
    dilation: Sizes,
    groups: int,
) -> Tensor:
    _require_tensors(name, rank, x, weight, bias, groups)
    stride = _each(name, "stride", stride, rank, 1)
    dilation = _each(name, "dilation", dilation, rank, 1)
    kernel = tuple(weight.shape[2:])
    if isinstance(padding, str):
        x, padding = _padded(name, x, padding, stride, dilation, kernel)
    else:
        padding = _each(name, "padding", padding, rank, 0)
    _require_room(name, x, padding, dilation, kernel)
    x, weight, bias = autocast_like_torch(x, weight, bias)
    require_one_dtype(name, input=x, weight=weight, bias=bias)
    geometry = Geometry(stride, padding, dilation, groups, tuple(x.shape[-rank:]), kernel)
    if x.dim() == rank + 1:
        return Convolution.call(x.unsqueeze(0), weight, bias, geometry).squeeze(0)
    return Convolution.call(x, weight, bias, geometry)


def _padded(
    name: str, x: Tensor, padding: str, stride: tuple[int, ...], dilation: tuple[int, ...], kernel: tuple[int, ...]
) -> tuple[Tensor, tuple[int, ...]]:
    """Return the input, padded by an odd remainder on the right as in torch, and the symmetric padding."""
    if padding not in ("same", "valid"):
        raise InputError(f"{name}: padding: expected ints, 'same' or 'valid', got {padding!r}.")
    if padding == "valid":
        return x, (0,) * len(kernel)
    if any(step != 1 for step in stride):
        raise InputError(f"{name}: padding: 'same' needs stride 1, got stride {stride}; pass the padding as ints.")
    total = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    if any(each % 2 for each in total):
        # torch.nn.functional.pad starts with the last dimension.
        x = torch.nn.functional.pad(x, [side for each in reversed(total) for side in (0, each % 2)])
    return x, tuple(each // 2 for each in total)


def _each(name: str, argument: str, value: Any, rank: int, least: int) -> tuple[int, ...]:
    if type(value) is int and value >= least:
        return (value,) * rank
    values = tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else (value,)
    if len(values) == 1:
        values = values * rank
    valid = all(isinstance(each, torch.SymInt) or is_int(each) for each in values)
    if not valid or len(values) != rank or any(each < least for each in values):
        raise InputError(f"{name}: {argument}: expected an int of {least} or more, or {rank} of them, got {value!r}.")
    return values


def _require_tensors(name: str, rank: int, x: Tensor, weight: Tensor, bias: Tensor | None, groups: int) -> None:
    require_floating(name, input=x, weight=weight, **({} if bias is None else {"bias": bias}))
    if weight.dim() != rank + 2:
        raise InputError(
            f"{name}: weight: expected {rank + 2} dimensions (out channels, in channels / groups, kernel), "
            f"got shape {tuple(weight.shape)}."
        )
    if x.dim() not in (rank + 1, rank + 2):
        raise InputError(
            f"{name}: input: expected {rank + 2} dimensions, or {rank + 1} without a batch, got shape {tuple(x.shape)}."
        )
    if not is_int(groups) or groups < 1 or weight.shape[0] % groups:
        raise InputError(f"{name}: groups: expected a divisor of the {weight.shape[0]} out channels, got {groups!r}.")
    if x.shape[-rank - 1] != weight.shape[1] * groups:
        raise InputError(
            f"{name}: input: expected {weight.shape[1] * groups} channels for weight {tuple(weight.shape)} in {groups} "
            f"group(s), got {x.shape[-rank - 1]} in shape {tuple(x.shape)}."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise InputError(f"{name}: bias: expected shape ({weight.shape[0]},), got {tuple(bias.shape)}.")


def _require_room(
    name: str, x: Tensor, padding: tuple[int, ...], dilation: tuple[int, ...], kernel: tuple[int, ...]
) -> None:
    size = tuple(x.shape[-len(kernel) :])
    if any(k < 1 for k in kernel):
        raise InputError(f"{name}: weight: expected a kernel of at least one element, got size {kernel}.")
    if any(n + 2 * p < d * (k - 1) + 1 for n, p, d, k in zip(size, padding, dilation, kernel, strict=True)):
        raise InputError(
            f"{name}: input: expected spatial sizes that hold the kernel {kernel} with dilation {dilation}, "
            f"got {size} with padding {padding}; increase the padding."
        )
