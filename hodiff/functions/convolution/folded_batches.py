r"""Batches of convolutions as one convolution, by folding the batch into an axis.

Convolution is the contraction $y_{n,g,o} = \sum_i w_{g,o,i} * x_{n,g,i}$ over input channels $i$ in group $g$. A batch
of contractions is one larger contraction when the batch extends an index that all batched tensors share and no other
tensor has: samples for input and output, output channels for weight and output, input channels for weight and input,
groups for all three.
"""

from __future__ import annotations

from torch import Tensor

# Axes of each tensor once groups and channels are split; spatial axes follow.
AXES = {
    "x": ("sample", "group", "in"),
    "weight": ("group", "out", "in"),
    "output": ("sample", "group", "out"),
    "bias": ("group", "out"),
}


def fold_axis(*, x: bool, weight: bool, output: bool) -> str:
    """Return the axis in `AXES` for the batch, given which of input, weight and output (or gradients) are batched."""
    return {
        (True, False, True): "sample",
        (False, True, True): "out",
        (True, True, False): "in",
        (True, True, True): "group",
    }[x, weight, output]


def fold(tensor: Tensor, kind: str, dim: int | None, axis: str, groups: int) -> Tensor:
    """Fold the batch dimension of a tensor into an axis, in front; `kind` is the tensor's key in `AXES`."""
    if dim is None:
        return tensor
    at = AXES[kind].index(axis)
    channels = AXES[kind].index("group")
    front = tensor.movedim(dim, 0)
    split = front.unflatten(1 + channels, (groups, front.shape[1 + channels] // groups))
    return split.movedim(0, at).flatten(at, at + 1).flatten(channels, channels + 1)


def unfold(tensor: Tensor, kind: str, axis: str, groups: int, batch: int) -> Tensor:
    """Undo `fold` on a result: the batch dimension comes first."""
    at = AXES[kind].index(axis)
    channels = AXES[kind].index("group")
    folded_groups = groups * batch if axis == "group" else groups
    split = tensor.unflatten(channels, (folded_groups, tensor.shape[channels] // folded_groups))
    split = split.unflatten(at, (batch, split.shape[at] // batch)).movedim(at, 0)
    return split.flatten(1 + channels, 2 + channels)
