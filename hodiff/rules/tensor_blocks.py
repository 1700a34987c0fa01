"""Blocks of a tensor that are processed one at a time, so that intermediate results stay small."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hodiff.torch_internals.autograd.legacy_batching import is_legacy_batched
from hodiff.torch_internals.tensors import is_zero_without_memory

# Elements in a block: as many as fit a processor's caches, or keep a GPU busy.
AUTO = {"cpu": 2**20, "cuda": 2**25}


def block_size(chunk_size: int | str | None, x: Tensor, dim: int) -> int | None:
    """Number of elements in a block of `chunk_size` samples along `dim`, or None for no limit."""
    # Do not cut compiled code, where sizes may be symbols.
    if chunk_size is None or torch.compiler.is_compiling():
        return None
    if isinstance(chunk_size, str):
        return AUTO.get(x.device.type, AUTO["cuda"])
    return max(1, chunk_size * x.shape[dim])


def allows_in_place(*tensors: Tensor | None) -> bool:
    """Whether `forward` may change its intermediate results in place."""
    # Not under `torch.compile`, which differentiates through it; not with the zeros without memory that forward mode
    # passes; and not with `is_grads_batched=True`, which batches tensors without asking for a rule.
    if torch.compiler.is_compiling():
        return False
    present = [each for each in tensors if each is not None]
    # A stand-in for a tensor, such as a jet, has no memory to write to.
    return all(
        isinstance(each, Tensor) and not (is_zero_without_memory(each) or is_legacy_batched(each)) for each in present
    )


def blocks(dim: int, limit: int | None, x: Tensor, *others: Tensor) -> list[tuple[slice, ...]]:
    """Slices that cut the dimensions before `dim` (negative) into blocks of at most `limit` elements, if possible."""
    if limit is None or x.numel() <= limit or not allows_in_place(x, *others):
        return [()]
    return list(_cuts(x.shape, dim, limit))


def _cuts(shape: torch.Size, dim: int, limit: int) -> Iterator[tuple[slice, ...]]:
    size = math.prod(shape)
    if size <= limit or len(shape) + dim == 0:
        yield ()
        return
    step = max(1, limit * shape[0] // size)
    for start in range(0, shape[0], step):
        piece = slice(start, min(start + step, shape[0]))
        if step > 1:
            yield (piece,)
        else:
            for inner in _cuts(shape[1:], dim, limit):
                yield (piece, *inner)


def broadcast_shape(*shapes: Sequence[int]) -> list[int]:
    """Return the shape that shapes broadcast to, faster than torch.broadcast_shapes."""
    rank = max(map(len, shapes))
    aligned = [(1,) * (rank - len(shape)) + tuple(shape) for shape in shapes]
    return [next((size for size in sizes if size != 1), 1) for sizes in zip(*aligned, strict=True)]


def block_of(tensor: Tensor, slices: tuple[slice, ...], rank: int) -> Tensor:
    """Return a view of the part of a tensor that broadcasts with a block, given the slices of the block."""
    if not slices:
        return tensor
    missing = rank - tensor.dim()
    index: list[slice] = []
    for position, piece in enumerate(slices[max(missing, 0) :], start=max(-missing, 0)):
        index.append(piece if tensor.shape[position] != 1 else slice(None))
    return tensor[(slice(None),) * max(-missing, 0) + tuple(index)]
