"""Which blocks of keys the queries see that a `BlockMask` of torch describes.

A block is one of three kinds: nobody looks into it, its mask function decides, or everything in it is seen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from hodiff.errors import InputError
from hodiff.torch_internals.autograd.wrapped_tensors import is_batched_by_any

# Torch's way to say that there are no blocks: one, larger than anything.
_NO_BLOCKS = 2**30


class Seen(NamedTuple):
    """The keys that a block of rows may see, kept as blocks, whose tables are small beside the weights.

    Attributes:
        first: The first key, where they stand one behind the other.
        total: How many they are.
        sizes: Queries and keys of a block.
        columns: The blocks that they stand in, where there are others between; or None.
        masked: Boolean tensor (B or 1, H or 1, blocks of these rows, blocks of these keys), where the mask function is
            asked; None for everywhere.
        whole: The same, where everything is seen whatever it says; None for nowhere.
    """

    first: int
    total: int
    sizes: tuple[int, int] = (1, 1)
    columns: Tensor | None = None
    masked: Tensor | None = None
    whole: Tensor | None = None

    def positions(self, device: torch.device) -> Tensor:
        """Those of the keys."""
        place = torch.arange(self.total, device=device)
        if self.columns is None:
            return self.first + place
        size = self.sizes[1]
        return self.columns[place // size] * size + place % size

    def in_full(self, table: Tensor | None, start: int, rows: int) -> Tensor | None:
        """A table with a number for each of these rows and keys."""
        if table is None:
            return None
        size = self.sizes[0]
        blocks = torch.arange(start, start + rows, device=table.device) // size - start // size
        return table[:, :, blocks][..., torch.arange(self.total, device=table.device) // self.sizes[1]]


@dataclass(frozen=True)
class Blocks:
    """The kinds of blocks, as tables of the blocks of queries and of keys.

    Attributes:
        rows: Queries of a block.
        columns: Keys of a block.
        masked: Boolean tensor (B or 1, H or 1, blocks of queries, blocks of keys), where the mask function decides.
        whole: The same, where everything is seen.
    """

    rows: int
    columns: int
    masked: Tensor
    whole: Tensor

    def seen(self, start: int, rows: int, keys: int) -> Seen:
        """What these queries see, in any batch and head."""
        sizes = self.rows, self.columns
        of_rows = slice(start // self.rows, (start + rows - 1) // self.rows + 1)
        masked, whole = (each[:, :, of_rows] for each in (self.masked, self.whole))
        if torch.compiler.is_compiling():  # what is in the tables is not known
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
    """The blocks of a `BlockMask`.

    Args:
        masked: How many blocks of keys its function decides on for each block of queries, and which, first in a list.
        whole: How many are seen whole, and which; or None and None.
        size: Queries and keys of a block.
        length: Number of queries.
        keys: Number of keys.

    Returns:
        The blocks, or None where it has none.

    Raises:
        InputError: If there are too few blocks.
    """
    rows, columns = size
    if rows >= _NO_BLOCKS and columns >= _NO_BLOCKS:
        return None
    count = -(-keys // columns)
    partly = _table(*masked, count)
    fully = torch.zeros_like(partly) if whole[0] is None else _table(*whole, count)
    if partly.shape[-2] * rows < length:
        raise InputError(
            f"flex_attention: block_mask: expected blocks of {rows} queries for {length} queries, got "
            f"{partly.shape[-2]} of them; create_block_mask(mask_mod, B, H, {length}, {keys}) makes as many as there "
            f"must be."
        )
    return Blocks(rows, columns, partly, fully)


def require_block_mask(block_mask: Any, batch: int, heads: int, length: int, keys: int, device: torch.device) -> None:
    """Refuse what is no `BlockMask`, or one of other sizes."""
    if not isinstance(block_mask, BlockMask):
        raise InputError(
            f"flex_attention: block_mask: expected None or torch.nn.attention.flex_attention.BlockMask, got "
            f"{type(block_mask).__name__}; create_block_mask makes one of a mask_mod."
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
            "flex_attention: block_mask: expected the same one for a whole batch of torch.func.vmap, got one with "
            "tables of each row of it; give mask_mod in its place."
        )


def _table(counts: Tensor, indices: Tensor, columns: int) -> Tensor:
    """Where blocks are, of lists of their columns of which so many count."""
    counts, indices = (each[(None,) * (4 + shift - each.dim())] for each, shift in ((counts, -1), (indices, 0)))
    listed = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
    # Those that do not count share a column behind the last.
    places = torch.where(listed & (indices < columns), indices.long(), columns)
    table = torch.zeros((*indices.shape[:-1], columns + 1), dtype=torch.bool, device=indices.device)
    return table.scatter(-1, places, True)[..., :columns]
