"""Patches of inputs that a convolution multiplies with its weight, in any number of dimensions."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor


def patches(module: Any, x: Tensor) -> Tensor:
    """Return inputs (N, C, *L) of a convolution as patches (N, places, groups, C/groups * kernel)."""
    dims = len(module.kernel_size)
    x = F.pad(x, _padding(module), "constant" if module.padding_mode == "zeros" else module.padding_mode)
    for axis, size in enumerate(module.kernel_size):
        step, dilation = module.stride[axis], module.dilation[axis]
        # The window spans a dilated kernel, and keeps the elements that the kernel touches.
        x = x.unfold(2 + axis, dilation * (size - 1) + 1, step)[..., ::dilation]
    # The shape is now (N, C, *places, *kernel).
    n, channels = x.shape[:2]
    x = x.flatten(2 + dims).flatten(2, 1 + dims)
    grouped = x.reshape(n, module.groups, channels // module.groups, *x.shape[2:])
    return grouped.permute(0, 3, 1, 2, 4).flatten(3)


def _padding(module: Any) -> list[int]:
    """Return the padding as `F.pad` takes it, the last dimension first."""
    sides: list[int] = []
    for axis in reversed(range(len(module.kernel_size))):
        if module.padding == "valid":
            sides += [0, 0]
        elif module.padding == "same":
            total = module.dilation[axis] * (module.kernel_size[axis] - 1)
            sides += [total // 2, total - total // 2]
        else:
            sides += [module.padding[axis]] * 2
    return sides
