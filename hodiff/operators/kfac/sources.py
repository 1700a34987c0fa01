r"""Kinds of layers and how they multiply their parameters: inputs as vectors a, gradients of outputs as vectors g.

The gradient of a layer's weight in one example is the sum of $g_r a_r^\top$ over the places r that share the weight.
Inputs are (N, places, groups, q), or (N, places) for the rows that an embedding picks. A set of c gradients is
(c, N, places, groups, p).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def patches(module: Any, x: Tensor) -> Tensor:
    """Return inputs (N, C, *L) of a convolution as patches (N, places, groups, C/groups * kernel)."""
    dims = len(module.kernel_size)
    x = F.pad(x, _padding(module), "constant" if module.padding_mode == "zeros" else module.padding_mode)
    if dims == 2:
        # Torch's operator for images copies them in half the time.
        columns = F.unfold(x, module.kernel_size, module.dilation, 0, module.stride)
        return columns.reshape(len(x), module.groups, -1, columns.shape[2]).permute(0, 3, 1, 2)
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


Inputs = Callable[[Any, Tensor], Tensor]
Gradients = Callable[[Any, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Kind:
    """A kind of layer.

    Attributes:
        weight: Vectors g of the weight, for the layer, its input and the gradients of its output.
        bias: Vectors g of the bias.
        inputs: Vectors a of the weight; None if they are 1, as in a norm.
        sizes: (groups, p, q) of the weight.
        one_hot: Whether inputs are row indices.
        inputs_first: Whether the weight has its inputs first.
        rank: Least number of dimensions of an input, including examples and features.
        refused: The unsupported options of a layer, in words, or "".
    """

    weight: Gradients
    bias: Gradients
    inputs: Inputs | None
    sizes: Callable[[Any], tuple[int, int, int]]
    one_hot: bool = False
    inputs_first: bool = False
    rank: Callable[[Any], int] = lambda module: 2
    refused: Callable[[Any], str] = lambda module: ""


def _last(module: Any, x: Tensor, g: Tensor) -> Tensor:
    """Return gradients of outputs with features in the last dimension."""
    return g.reshape(*g.shape[:2], -1, 1, g.shape[-1])


def _channels(module: Any, x: Tensor, g: Tensor) -> Tensor:
    """Return gradients of outputs with channels in the second dimension, in groups."""
    c, n, channels = g.shape[:3]
    groups = module.groups
    return g.reshape(c, n, groups, channels // groups, -1).permute(0, 1, 4, 2, 3)


def _scales(normalized: Callable[[Any, Tensor], Tensor], shared: Gradients) -> Gradients:
    """Return gradients of a norm's scale: gradients of its shift, times the normalized input."""
    return lambda module, x, g: shared(module, x, g * normalized(module, x))


def _summed_features(module: Any, x: Tensor, g: Tensor) -> Tensor:
    """Sum gradients over all but the last dimensions, which a norm scales."""
    size = module.weight.numel()
    return g.reshape(*g.shape[:2], -1, size).sum(2)[:, :, None, None]


def _summed_channels(module: Any, x: Tensor, g: Tensor) -> Tensor:
    """Sum gradients over all but the channels, in the second dimension."""
    return g.flatten(3).sum(3)[:, :, None, None] if g.dim() > 3 else g[:, :, None, None]


def _layer_normalized(module: Any, x: Tensor) -> Tensor:
    return F.layer_norm(x, module.normalized_shape, eps=module.eps)


def _rms_normalized(module: Any, x: Tensor) -> Tensor:
    return F.rms_norm(x, module.normalized_shape, eps=module.eps)


def _group_normalized(module: Any, x: Tensor) -> Tensor:
    return F.group_norm(x, module.num_groups, eps=module.eps)


def _batch_normalized(module: Any, x: Tensor) -> Tensor:
    if module.training or not module.track_running_stats:
        return F.batch_norm(x, None, None, training=True, eps=module.eps)
    return F.batch_norm(x, module.running_mean, module.running_var, training=False, eps=module.eps)


def _instance_normalized(module: Any, x: Tensor) -> Tensor:
    own = module.training or not module.track_running_stats
    return F.instance_norm(x, module.running_mean, module.running_var, use_input_stats=own, momentum=0, eps=module.eps)


def _norm(
    normalized: Callable[[Any, Tensor], Tensor], summed: Gradients, rank: Callable[[Any], int] = lambda module: 2
) -> Kind:
    return Kind(_scales(normalized, summed), summed, None, lambda module: (1, module.weight.numel(), 1), rank=rank)


def _rank_of_features(module: Any) -> int:
    return 1 + len(module.normalized_shape)


def _conv_sizes(module: Any) -> tuple[int, int, int]:
    groups = module.groups
    return groups, module.out_channels // groups, module.weight[0].numel()


# Remedy for the options that `_renormalized` names.
WITHOUT_OPTIONS = "set scale_grad_by_freq=False and max_norm=None"


def _renormalized(module: Any) -> str:
    options = {"max_norm": module.max_norm is not None, "scale_grad_by_freq": module.scale_grad_by_freq}
    return ", ".join(name for name, given in options.items() if given)


def _picked(module: Any, x: Tensor) -> Tensor:
    """Return row indices, with -1 for the padding row, which has no gradient."""
    rows = x.reshape(len(x), -1)
    return rows if module.padding_idx is None else rows.masked_fill(rows == module.padding_idx, -1)


LINEAR = Kind(
    _last, _last, lambda m, x: x.reshape(len(x), -1, 1, m.in_features), lambda m: (1, m.out_features, m.in_features)
)
CONVOLUTION = Kind(_channels, _channels, patches, _conv_sizes, rank=lambda m: 2 + len(m.kernel_size))
EMBEDDING = Kind(
    _last,
    _last,
    _picked,
    lambda m: (1, m.embedding_dim, m.num_embeddings),
    one_hot=True,
    inputs_first=True,
    rank=lambda m: 1,
    refused=_renormalized,
)
BATCH_NORM = _norm(_batch_normalized, _summed_channels)

KINDS: dict[type[nn.Module], Kind] = {
    nn.Linear: LINEAR,
    nn.Conv1d: CONVOLUTION,
    nn.Conv2d: CONVOLUTION,
    nn.Conv3d: CONVOLUTION,
    nn.Embedding: EMBEDDING,
    nn.LayerNorm: _norm(_layer_normalized, _summed_features, _rank_of_features),
    nn.RMSNorm: _norm(_rms_normalized, _summed_features, _rank_of_features),
    nn.GroupNorm: _norm(_group_normalized, _summed_channels),
    nn.BatchNorm1d: BATCH_NORM,
    nn.BatchNorm2d: BATCH_NORM,
    nn.BatchNorm3d: BATCH_NORM,
    nn.InstanceNorm1d: _norm(_instance_normalized, _summed_channels, lambda module: 3),
    nn.InstanceNorm2d: _norm(_instance_normalized, _summed_channels, lambda module: 4),
    nn.InstanceNorm3d: _norm(_instance_normalized, _summed_channels, lambda module: 5),
}
# Layers of other libraries, which need not be installed, by module and name.
_OF_LIBRARIES = {
    ("transformers.pytorch_utils", "Conv1D"): Kind(
        _last, _last, lambda m, x: x.reshape(len(x), -1, 1, m.nx), lambda m: (1, m.nf, m.nx), inputs_first=True
    )
}
# Layers that mix examples if they use a batch's own statistics.
MIXING = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def known_type(module: nn.Module) -> type[nn.Module] | None:
    """Return the first class in the layer's method resolution order that is in the table, or None."""
    for each in type(module).__mro__:
        if (kind := _OF_LIBRARIES.get((each.__module__, each.__name__))) is not None:
            KINDS.setdefault(each, kind)
        if each in KINDS:
            return each
    return None


def one_hot_counts(rows: Tensor, values: Tensor, size: int) -> Tensor:
    """Add up values (m, d) by their row indices (m,), to (size, d)."""
    return torch.zeros(size, values.shape[1], dtype=values.dtype, device=values.device).index_add_(0, rows, values)
