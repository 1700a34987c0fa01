"""Columns of Hessians of atoms, multiplied in groups that fit into memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hodiff.common.chunks import LivePeak, resolve_chunk_size
from hodiff.operators import HessianOperator

# Measured bytes of a group of columns under chunk_size="auto". On a CPU, groups that leave the cache were slower than
# single columns: with MACE and TorchANI, 10 to 40 MiB were fastest. Groups of two or three columns cost more than as
# many single columns.
_BUDGET = {"cpu": 16 * 2**20, "accelerator": 2**30}
_LEAST = 4
# Bytes of the groups that threads of a CPU compute at once; a single column may take more.
_ALL_THREADS = 512 * 2**20
# Number of columns that a compiled graph multiplies: each width is compiled anew.
_COMPILED = 8


def in_groups(A: HessianOperator, columns: int, chunk_size: int | str | None, compute: Callable[[], Tensor]) -> Tensor:
    """Give the operator groups of columns that fit into memory, and compute; again with smaller ones if it runs out."""
    A.chunk_size, A.threads = _group_size(A, columns, chunk_size)
    while True:
        try:
            return compute()
        except torch.OutOfMemoryError:
            if A.chunk_size == 1 or chunk_size != "auto":
                raise
        if A.device.type == "cuda":
            torch.cuda.empty_cache()
        A.chunk_size = max(A.chunk_size // 4, 1)


def _group_size(A: HessianOperator, columns: int, chunk_size: int | str | None) -> tuple[int, int]:
    """Return the number of columns in a group, and of groups at once."""
    if chunk_size != "auto" or columns < 3:
        return resolve_chunk_size(None if chunk_size == "auto" else chunk_size, columns, 0, A.device), 1
    # The first product records the gradient, whose memory does not grow with the group.
    A @ first_columns(A, 1)
    with LivePeak() as live:
        A @ first_columns(A, 1)
    bytes_each = max(live.peak, 1)
    size = columns_in(bytes_each, columns, chunk_size, A.device)
    if A.device.type != "cpu":
        return size, 1
    threads = torch.get_num_threads()
    size = 1 if size < _LEAST else max(min(size, -(-columns // threads)), _LEAST)
    return size, max(min(threads, _ALL_THREADS // (bytes_each * size)), 1)


def columns_in(bytes_each: int, columns: int, chunk_size: int | str | None, device: torch.device) -> int:
    """Return the number of columns in a group, of which each takes `bytes_each` of measured memory."""
    if chunk_size == "auto":
        chunk_size = max(_BUDGET["cpu" if device.type == "cpu" else "accelerator"] // max(bytes_each, 1), 1)
    return resolve_chunk_size(chunk_size, columns, bytes_each, device)


def first_columns(A: HessianOperator, count: int) -> Tensor:
    """Return the first unit vectors (n, count)."""
    return torch.eye(A.shape[0], count, dtype=A.dtype, device=A.device)


def multiply_columns(
    A: HessianOperator, block: Tensor, chunk_size: int | str | None, *, compiled: bool = False
) -> Tensor:
    """Multiply a block of columns in groups that fit into memory; compiled, in groups of one width."""
    count = block.shape[1]
    if not compiled:
        return in_groups(A, count, chunk_size, lambda: A @ block)
    A.chunk_size = resolve_chunk_size(_COMPILED if chunk_size == "auto" else chunk_size, count, 0, A.device)
    return (A @ torch.nn.functional.pad(block, (0, -count % A.chunk_size)))[:, :count]


def unit_columns(atoms: Tensor, point: Tensor) -> Tensor:
    """Return the unit vectors (3 F, 3 R) of the coordinates of some atoms."""
    coordinates = (3 * atoms[:, None] + torch.arange(3)).flatten()
    unit = point.new_zeros(point.numel(), len(coordinates))
    unit[coordinates.to(point.device), torch.arange(len(coordinates), device=point.device)] = 1
    return unit
