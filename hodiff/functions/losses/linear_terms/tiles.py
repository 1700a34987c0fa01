"""Evaluation of a formula of many samples and many classes on one tile of both at a time.

Classes are the outer loop, so that a large weight is read once, and a gradient of its size written once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

# Logits in a tile, and the most samples. On a CPU the nearer caches hold a tile. 32 MiB of float32 fit into the caches
# of data-centre GPUs (40 MiB or more), which were not timed with tiles of this size.
TILE = {"cpu": 2**19, "cuda": 2**23}
SAMPLES = {"cpu": 1024, "cuda": 4096}
# Up to this number of logits, 8 MiB in float32, use no tiles: complete rows take fewer matrix products.
WHOLE = 2**21

Merge = Callable[[Tensor, Tensor], Any]


def add(total: Tensor, part: Tensor) -> None:
    """Add a part in place to the sum over other classes."""
    total.add_(part)


def join_terms(total: Tensor, part: Tensor) -> None:
    """Add terms in place to the sum over other classes; the first term is a log-sum-exp."""
    first = torch.logaddexp(total[..., :1], part[..., :1])
    total.add_(part)
    total[..., :1] = first


def tilewise(
    formula: Any,
    by_samples: Sequence[bool],
    outputs_by_samples: Sequence[bool],
    tensors: Sequence[Tensor | None],
    merge: Merge,
    dtype: torch.dtype,
) -> tuple[Tensor, ...]:
    """Evaluate a formula on all tiles.

    Args:
        formula: A function of a tile's first class and tensors, whose outputs are sums over classes or over samples.
        by_samples: Whether dimension -2 of each tensor has samples; it has classes otherwise.
        outputs_by_samples: Whether dimension -2 of each output has samples.
        tensors: Tensors with equal dimensions before the last two.
        merge: Adds up outputs that have samples, in place.
        dtype: Dtype of outputs that have classes, which are sums over samples.

    Returns:
        The outputs.
    """
    batch = next(each.shape[:-2] for each in tensors if each is not None)
    if not batch:
        return _tilewise(formula, by_samples, outputs_by_samples, tensors, merge, dtype)
    found: list[Tensor] = []
    for place in itertools.product(*map(range, batch)):
        at = [None if each is None else each[place] for each in tensors]
        parts = _tilewise(formula, by_samples, outputs_by_samples, at, merge, dtype)
        found = found or [part.new_empty(*batch, *part.shape) for part in parts]
        for whole, part in zip(found, parts, strict=True):
            whole[place] = part
    return tuple(found)


def _tilewise(
    formula: Any,
    by_samples: Sequence[bool],
    outputs_by_samples: Sequence[bool],
    tensors: Sequence[Tensor | None],
    merge: Merge,
    dtype: torch.dtype,
) -> tuple[Tensor, ...]:
    sizes, device = [0, 0], ""
    for each, has_samples in zip(tensors, by_samples, strict=True):
        if each is not None:
            sizes[has_samples] = each.shape[-2]
            device = each.device.type
    classes, samples = sizes
    height = max(1, min(samples, SAMPLES.get(device, SAMPLES["cuda"])))
    width = max(1, TILE.get(device, TILE["cuda"]) // height)
    found: list[Any] = [None] * len(outputs_by_samples)
    for first in range(0, classes, width):
        sums: list[Any] = [None] * len(outputs_by_samples)
        for start in range(0, samples, height):
            cuts = [
                None if each is None else _cut(each, start, height) if has_samples else _cut(each, first, width)
                for each, has_samples in zip(tensors, by_samples, strict=True)
            ]
            for i, part in enumerate(formula(first, *cuts)):
                if not outputs_by_samples[i]:
                    sums[i] = part if sums[i] is None else sums[i].add_(part)
                    continue
                if found[i] is None:
                    found[i] = part.new_empty(samples, part.shape[-1])
                place = _cut(found[i], start, height)
                if first:
                    merge(place, part)
                else:
                    place.copy_(part)
        for i, each in enumerate(sums):
            if each is not None:
                if found[i] is None:
                    found[i] = each.new_empty(classes, each.shape[-1], dtype=dtype)
                _cut(found[i], first, width).copy_(each)
    return tuple(found)


def _cut(t: Tensor, start: int, size: int) -> Tensor:
    return t.narrow(-2, start, min(size, t.shape[-2] - start))
