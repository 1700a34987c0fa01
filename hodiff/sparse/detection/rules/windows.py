"""Rules for convolutions and pooling: an element of the result depends on a window of the argument."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from hodiff.sparse.detection.call import Call, rule
from hodiff.sparse.detection.supports import Indices, Supports


def windows(
    size: Sequence[int],
    results: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Indices:
    """Flat positions (results, elements of a window) of the elements of windows, and -1 for positions outside."""
    flat: Indices = np.zeros((), dtype=np.int64)
    inside = np.ones((), dtype=bool)
    rank = len(size)
    for dim in range(rank):
        starts = np.arange(results[dim]) * stride[dim] - padding[dim]
        places = starts[:, None] + np.arange(kernel[dim]) * dilation[dim]
        shape = [1] * (2 * rank)
        shape[dim], shape[rank + dim] = places.shape
        places = places.reshape(shape)
        flat = flat * size[dim] + places
        inside = inside & (places >= 0) & (places < size[dim])
    count = int(np.prod(results))
    return np.where(inside, flat, -1).reshape(count, -1)


def gathered(x: Supports, places: Indices, results: Sequence[int]) -> Supports:
    """Union of the elements of each window: (N, C, sizes) to (N, C, results)."""
    flat = x.which.reshape(*x.shape[:2], -1)
    inside = np.where(places >= 0, flat[..., places], 0)
    return x.take(inside).over((-1,)).reshape(*x.shape[:2], *results)


def scattered(y: Supports, places: Indices, size: Sequence[int]) -> Supports:
    """Union of the windows that contain each element: (N, C, results) to (N, C, sizes)."""
    count = int(np.prod(size))
    results, width = places.shape
    planes = np.arange(y.shape[0] * y.shape[1]).reshape(*y.shape[:2], 1, 1)
    groups = planes * count + np.where(places >= 0, places, 0)
    which = np.broadcast_to(y.which.reshape(*y.shape[:2], results, 1), (*y.shape[:2], results, width))
    return y.take(np.where(places >= 0, which, 0)).merged(groups, (*y.shape[:2], *size))


def _per_group(x: Supports, groups: int) -> Supports:
    """Union over the channels of each group, (N, groups, sizes)."""
    return x.reshape(x.shape[0], groups, -1, *x.shape[2:]).over((2,))


def _channels(x: Supports, channels: int) -> Supports:
    """Repeat the supports of each group for all of its channels."""
    return x.take(np.repeat(x.which, channels // x.shape[1], axis=1))


class _Convolution:
    """Geometry of a call of a convolution, or of its gradient."""

    def __init__(self, call: Call, x: Tensor, y: Tensor, weight: Tensor) -> None:
        rank = weight.dim() - 2
        self.transposed, self.groups = call["transposed"], call["groups"]
        fine, coarse = (y, x) if self.transposed else (x, y)
        self.fine, self.coarse = fine.shape[2:], coarse.shape[2:]
        options = [_each(call[name], rank) for name in ("stride", "padding", "dilation")]
        self.places = windows(self.fine, self.coarse, weight.shape[2:], *options)

    def forward(self, x: Supports) -> Supports:
        """Map supports of the argument to supports of the result, with groups as channels."""
        x = _per_group(x, self.groups)
        return scattered(x, self.places, self.fine) if self.transposed else gathered(x, self.places, self.coarse)

    def backward(self, y: Supports) -> Supports:
        """Map supports of the result to supports of the argument, with groups as channels."""
        y = _per_group(y, self.groups)
        return gathered(y, self.places, self.coarse) if self.transposed else scattered(y, self.places, self.fine)


def _each(value: Any, rank: int) -> list[int]:
    values = list(value) if isinstance(value, Sequence) else [value]
    return values * rank if len(values) == 1 else values


def _of_outputs(weight: Supports, transposed: bool, groups: int) -> Supports:
    """Union of the weights that contribute to each output channel, (channels,)."""
    if not transposed:
        return weight.reshape(weight.shape[0], -1).over((1,))
    by_group = weight.reshape(groups, -1, weight.shape[1], int(np.prod(weight.shape[2:])))
    return by_group.over((1, 3)).reshape(-1)


def _by_channel(x: Supports, rank: int) -> Supports:
    return x.reshape(1, -1, *(1,) * rank)


@rule("convolution")
def convolution(call: Call) -> list[Supports | None]:
    """Union of the window over all channels of the group, and of the output channel's weights."""
    x, weight, y = call["input"], call["weight"], call.outputs[0]
    rank = weight.dim() - 2
    geometry = _Convolution(call, x, y, weight)
    found = _channels(geometry.forward(call.supports(x)), y.shape[1])
    weights = _of_outputs(call.supports(weight), geometry.transposed, geometry.groups)
    if call["bias"] is not None:
        weights = weights | call.supports(call["bias"])
    return [found | _by_channel(weights, rank)]


@rule("convolution_backward")
def convolution_backward(call: Call) -> list[Supports | None]:
    """Input gradient from windows of the incoming gradient; weight and bias gradients from whole channels."""
    g, x, weight = call["grad_output"], call["input"], call["weight"]
    rank = weight.dim() - 2
    geometry = _Convolution(call, x, g, weight)
    incoming, given = call.supports(g), call.supports(x)
    # The outputs of the transposed convolution are the inputs.
    weights = _of_outputs(call.supports(weight), not geometry.transposed, geometry.groups)
    by_input = _channels(geometry.backward(incoming), x.shape[1]) | _by_channel(weights, rank)
    everywhere = (0, *range(2, rank + 2))
    by_channel = incoming.over(everywhere)
    coming, going = (
        (given.over(everywhere), by_channel) if geometry.transposed else (by_channel, given.over(everywhere))
    )
    # (first dimension, second dimension) of the weight: the second counts the channels of one group.
    first = coming.reshape(-1, 1)
    second = going.reshape(geometry.groups, 1, -1)
    second = second.take(np.repeat(second.which, weight.shape[0] // geometry.groups, axis=1)).reshape(
        weight.shape[0], -1
    )
    by_weight = (first | second).reshape(*weight.shape[:2], *(1,) * rank).broadcast(weight.shape)
    found = [by_input, by_weight, by_channel]
    return [each for each, wanted in zip(found, call["output_mask"], strict=True) if wanted]


_POOLING = (
    "avg_pool1d",
    "avg_pool2d",
    "avg_pool3d",
    "max_pool2d_with_indices",
    "max_pool3d_with_indices",
)


def _pooled(call: Call, x: Tensor, y: Tensor) -> tuple[Indices, Sequence[int], Sequence[int]]:
    rank = int(call.name.split("pool")[1][0])
    kernel = _each(call["kernel_size"], rank)
    stride = _each(call["stride"], rank) if call["stride"] else kernel
    padding, dilation = _each(call["padding"], rank), _each(call.get("dilation", 1), rank)
    size, results = x.shape[-rank:], y.shape[-rank:]
    return windows(size, results, kernel, stride, padding, dilation), size, results


# Pooling whose windows depend on sizes or random draws: number of dimensions of a plane.
_OF_PLANES = {
    "adaptive_max_pool2d": 2,
    "adaptive_max_pool3d": 3,
    "fractional_max_pool2d": 2,
    "fractional_max_pool3d": 3,
}


@rule(*_OF_PLANES)
def of_planes(call: Call) -> list[Supports | None]:
    """Union of the whole plane."""
    x = call["self"]
    return [_whole_planes(call.supports(x), _OF_PLANES[call.name], each) for each in call.outputs]


@rule(*(f"{each}_backward" for each in _OF_PLANES))
def of_planes_backward(call: Call) -> list[Supports | None]:
    """Union of the plane of incoming gradients."""
    g = call["grad_output"]
    return [_whole_planes(call.supports(g), _OF_PLANES[call.name.removesuffix("_backward")], call.outputs[0])]


def _whole_planes(x: Supports, rank: int, like: Tensor) -> Supports:
    dims = tuple(range(len(x.shape) - rank, len(x.shape)))
    return x.over(dims, keepdim=True).broadcast(like.shape)


@rule("grid_sampler_2d", "grid_sampler_3d")
def grid_sampler(call: Call) -> list[Supports | None]:
    """Union of the whole plane, and of the point of the grid."""
    x, points = call.supports(call["input"]), call.supports(call["grid"]).over((-1,))
    planes = _whole_planes(x, len(x.shape) - 2, call.outputs[0])
    return [planes | points.take(np.expand_dims(points.which, 1))]


@rule("grid_sampler_2d_backward", "grid_sampler_3d_backward")
def grid_sampler_backward(call: Call) -> list[Supports | None]:
    """Input gradient from all points of the grid; grid gradient from its own point and the whole input."""
    g, x, points = call.supports(call["grad_output"]), call.supports(call["input"]), call.supports(call["grid"])
    rank = len(x.shape) - 2
    incoming = g | points.over((-1,)).take(np.expand_dims(points.over((-1,)).which, 1))
    by_input = _whole_planes(incoming, rank, call["input"])
    places = x.over(tuple(range(1, rank + 2)))
    by_point = incoming.over((1,)) | places.reshape(-1, *(1,) * rank)
    by_grid = by_point.take(np.expand_dims(by_point.which, -1)).broadcast(call["grid"].shape)
    return [each for each, wanted in zip((by_input, by_grid), call["output_mask"], strict=True) if wanted]


def _planes(x: Supports, rank: int) -> Supports:
    return x.reshape(1, -1, *x.shape[len(x.shape) - rank :])


@rule(*_POOLING)
def pooling(call: Call) -> list[Supports | None]:
    """Union of each window."""
    x = call["self"]
    places, _, results = _pooled(call, x, call.outputs[0])
    found = gathered(_planes(call.supports(x), len(results)), places, results)
    return [found.reshape(*each.shape) for each in call.outputs]


@rule(*(f"{each}_backward" for each in _POOLING if each != "avg_pool1d"))
def pooling_backward(call: Call) -> list[Supports | None]:
    """Union of the incoming gradients of the windows that contain each element."""
    g, x = call["grad_output"], call["self"]
    places, size, _ = _pooled(call, x, g)
    found = scattered(_planes(call.supports(g), len(size)), places, size)
    return [found.reshape(*x.shape)]
