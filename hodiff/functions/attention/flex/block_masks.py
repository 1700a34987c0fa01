"""Blocks of keys that queries see, as described by a `BlockMask` of torch.

A block is of one of three kinds: it is hidden, the mask function decides inside it, or it is seen whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from hodiff.errors import InputError
from hodiff.torch_internals.autograd.wrapped_tensors import is_batched_by_any

# Torch encodes the absence of blocks as one block of at least this size.
_NO_BLOCKS = 2**30


class Seen(NamedTuple):
    """The keys that a block of rows may see, stored as blocks, whose tables are smaller than the weights.

    Attributes:
        first: The first key, if the keys are contiguous.
        total: Number of keys.
        sizes: Numbers of queries and keys in a block.
        columns: Indices of the blocks of keys, if they are not contiguous; else None.
        masked: Boolean tensor (B or 1, H or 1, blocks of these rows, blocks of these keys), True where the mask
            function decides; None for everywhere.
        whole: Boolean tensor of this shape, True where all keys are seen; None for nowhere.
    """

    first: int
    total: int
    sizes: tuple[int, int] = (1, 1)
    columns: Tensor | None = None
    masked: Tensor | None = None
    whole: Tensor | None = None

    def positions(self, device: torch.device) -> Tensor:
        """Return the positions of the keys."""
        place = torch.arange(self.total, device=device)
        if self.columns is None:
            return self.first + place
        size = self.sizes[1]
        return self.columns[place // size] * size + place % size

    def in_full(self, table: Tensor | None, start: int, rows: int) -> Tensor | None:
        """Expand a table of blocks to single rows and keys."""
        if table is None:
            return None
        size = self.sizes[0]
        blocks = torch.arange(start, start + rows, device=table.device) // size - start // size
        return table[:, :, blocks][..., torch.arange(self.total, device=table.device) // self.sizes[1]]


@dataclass(frozen=True)
class Blocks:
    """The kinds of blocks, as tables over blocks of queries and blocks of keys.

    Attributes:
        rows: Number of queries in a block.
        columns: Number of keys in a block.
        masked: Boolean tensor (B or 1, H or 1, blocks of queries, blocks of keys), True where the mask function
            decides.
        whole: Boolean tensor of this shape, True where all keys are seen.
    """

    rows: int
    columns: int
    masked: Tensor
    whole: Tensor

    def seen(self, start: int, rows: int, keys: int) -> Seen:
        """Return the keys that these queries see, in any batch and head."""
        sizes = self.rows, self.columns
        of_rows = slice(start // self.rows, (start + rows - 1) // self.rows + 1)
        masked, whole = (each[:, :, of_rows] for each in (self.masked, self.whole))
        if torch.compiler.is_compiling():  # the tables have no values yet
            return Seen(0, keys, sizes, None, masked, whole)
        columns = (masked | whole).flatten(0, -2).any(0).nonzero()[:, 0]
        if not len(columns):
            return Seen(0, 0)
        first, last = int(columns[0]), int(columns[-1])
        # The last block may be cut off.
        count = len(columns) * self.columns - max((last + 1) * self.columns - keys, 0)
        masked, whole = (each[..., columns] for each in (masked, whole))
        return Seen(
            first * self.columns,
            count,
            sizes,
            None if last - first + 1 == len(columns) else columns,
            None if bool(masked.all()) else masked,
            whole if bool(whole.any()) else None,
        )


def blocks_of(
    masked: tuple[Tensor, Tensor], whole: tuple[Any, Any], size: tuple[int, int], length: int, keys: int
) -> Blocks | None:
    """Read the blocks of a `BlockMask`; None if it has no blocks."""
    # `masked` and `whole` are the numbers of blocks of keys for each block of queries, and the indices of these blocks,
    # which come first in a list; the mask function decides inside masked blocks, and whole blocks are seen.
    rows, columns = size
    if rows >= _NO_BLOCKS and columns >= _NO_BLOCKS:
        return None
    count = -(-keys // columns)
    partly = _table(*masked, count)
    fully = torch.zeros_like(partly) if whole[0] is None else _table(*whole, count)
    if partly.shape[-2] * rows < length:
        raise InputError(
            f"flex_attention: block_mask: expected blocks of {rows} queries for {length} queries, got "
            f"{partly.shape[-2]} of them; create_block_mask(mask_mod, B, H, {length}, {keys}) creates the right number."
        )
    return Blocks(rows, columns, partly, fully)


def require_block_mask(block_mask: Any, batch: int, heads: int, length: int, keys: int, device: torch.device) -> None:
    """Raise if the argument is not a `BlockMask`, or does not fit the sizes and the device."""
    if not isinstance(block_mask, BlockMask):
        raise InputError(
            f"flex_attention: block_mask: expected None or torch.nn.attention.flex_attention.BlockMask, got "
            f"{type(block_mask).__name__}; create_block_mask creates one from a mask_mod."
        )
    if min(block_mask.BLOCK_SIZE) < _NO_BLOCKS:
        batches, for_heads, *sizes = (*[1] * (4 - len(block_mask.shape)), *block_mask.shape)
        fits = (batches == 1 or batches == batch) and (for_heads == 1 or for_heads == heads)
        if not fits or sizes != [length, keys]:
            raise InputError(
                f"flex_attention: block_mask: expected one of batch 1 or {batch}, heads 1 or {heads}, {length} queries "
                f"and {keys} keys, got {tuple(block_mask.shape)}; create_block_mask(mask_mod, B, H, {length}, {keys}) "
                f"makes one."
            )
    table = block_mask.kv_indices
    if table.device != device:
        raise InputError(
            f"flex_attention: block_mask: expected one on {device}, where q is, got one on {table.device}; "
            f"block_mask.to(q.device) copies it."
        )
    if not torch.compiler.is_compiling() and is_batched_by_any(table):
        raise InputError(
            "flex_attention: block_mask: expected one block mask for all rows of torch.func.vmap, got different "
            "tables for each row; pass mask_mod instead."
        )


def _table(counts: Tensor, indices: Tensor, columns: int) -> Tensor:
    """Make a boolean table of blocks from lists of column indices and their counts."""
    counts, indices = (each[(None,) * (4 + shift - each.dim())] for each, shift in ((counts, -1), (indices, 0)))
    listed = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
    # Indices beyond the count share a column behind the last, which is cut off.
    places = torch.where(listed & (indices < columns), indices.long(), columns)
    table = torch.zeros((*indices.shape[:-1], columns + 1), dtype=torch.bool, device=indices.device)
    return table.scatter(-1, places, True)[..., :columns]
