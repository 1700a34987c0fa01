"""The batched tensors of `torch.autograd.grad(is_grads_batched=True)`, which differ from those of `torch.func.vmap`.

A Function gets them in `forward` itself, where few operators support them and some give wrong values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

is_legacy_batched: Callable[[Tensor], bool] = torch._C._functorch.is_legacy_batchedtensor


def any_legacy_batched(tensors: Sequence[Tensor]) -> bool:
    """Whether a tensor is batched by `is_grads_batched=True`."""
    return any(map(is_legacy_batched, tensors))


def without_batches(tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[int | None]]:
    """Return tensors with the batch as first dimension, and its position: 0, or None for tensors without a batch."""
    level = _level()
    dims = [0 if is_legacy_batched(each) else None for each in tensors]
    plain = [
        each if d is None else torch._remove_batch_dim(each, level, 1, 0) for each, d in zip(tensors, dims, strict=True)
    ]
    return plain, dims


def with_batches(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return tensors with their first dimension as the batch."""
    return tuple(torch._add_batch_dim(each, 0, _level()) for each in tensors)


def _level() -> int:
    level = torch._C._vmapmode_increment_nesting()
    torch._C._vmapmode_decrement_nesting()
    return level - 1
