"""Convolution modules of torch, computed by `hodiff.functions`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hodiff.functions.convolution.convolve import conv1d, conv2d, conv3d
from hodiff.torch_internals.modules import padding_of_both_sides


class Conv1d(torch.nn.Conv1d):
    """`torch.nn.Conv1d`, computed by `hodiff.functions.conv1d`.

    Example:
        >>> import torch
        >>> Conv1d(2, 4, 3, padding=1)(torch.ones(1, 2, 5)).shape
        torch.Size([1, 4, 5])
    """

    def forward(self, input: Tensor) -> Tensor:
        """Apply `hodiff.functions.conv1d`."""
        return _convolve(self, conv1d, input)


class Conv2d(torch.nn.Conv2d):
    """`torch.nn.Conv2d`, computed by `hodiff.functions.conv2d`.

    Example:
        >>> import torch
        >>> Conv2d(2, 4, 3, padding="same", padding_mode="circular")(torch.ones(1, 2, 5, 5)).shape
        torch.Size([1, 4, 5, 5])
    """

    def forward(self, input: Tensor) -> Tensor:
        """Apply `hodiff.functions.conv2d`."""
        return _convolve(self, conv2d, input)


class Conv3d(torch.nn.Conv3d):
    """`torch.nn.Conv3d`, computed by `hodiff.functions.conv3d`.

    Example:
        >>> import torch
        >>> Conv3d(2, 4, 2, stride=2)(torch.ones(1, 2, 4, 4, 4)).shape
        torch.Size([1, 4, 2, 2, 2])
    """

    def forward(self, input: Tensor) -> Tensor:
        """Apply `hodiff.functions.conv3d`."""
        return _convolve(self, conv3d, input)


def _convolve(module: Any, function: Callable[..., Tensor], x: Tensor) -> Tensor:
    padding = module.padding
    if module.padding_mode != "zeros":
        x = F.pad(x, padding_of_both_sides(module), mode=module.padding_mode)
        padding = 0
    return function(x, module.weight, module.bias, module.stride, padding, module.dilation, module.groups)
