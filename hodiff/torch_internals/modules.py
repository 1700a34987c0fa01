"""What modules of `torch.nn` hold behind their public attributes."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

# The base of all norms with running statistics, and of all dropouts.
RunningNorm = _NormBase
Dropout = _DropoutNd


def buffers_by_name(module: nn.Module) -> dict[str, Tensor | None]:
    """The dict that holds a module's own buffers, to read and to write."""
    return module._buffers


def padding_of_both_sides(convolution: Any) -> list[int]:
    """A convolution's padding as `torch.nn.functional.pad` takes it."""
    padding: list[int] = convolution._reversed_padding_repeated_twice
    return padding
