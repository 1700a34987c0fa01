"""Which blocks of keys the queries see that a `BlockMask` of torch describes.

A block is one of three kinds: nobody looks into it, its mask function decides, or everything in it is seen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from hodiff.errors import InputError
from hodiff.torch_internals.wrapped_tensors import is_batched_by_any

# Torch's way to say that there are no blocks: one, larger than anything.
_NO_BLOCKS = 2**30


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

    def seen(self, start: int, rows: int, keys: int) -> Tensor:
        """The positions of the keys in those blocks that one of these queries sees, in any batch and head."""
        blocks = self._of_rows(start, rows)
        seen = (self.masked | self.whole)[..., blocks, :].flatten(0, -2).any(0).nonzero()[:, 0]
        positions = seen[:, None] * self.columns + torch.arange(self.columns, device=seen.device)
        positions = positions.flatten()
        return positions[positions < keys]

    def decides(self, start: int, rows: int, keys: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """What hides and what shows weights whatever the mask function says.

        Args:
            start: The first query.
            rows: The number of queries.
            keys: The positions of keys.

        Returns:
            Where the mask function is asked, and where everything is seen, as boolean tensors (B or 1, H or 1, queries,
            keys). None is everywhere for the first, and nowhere for the second.
        """
        queries = torch.arange(start, start + rows, device=keys.device) // self.rows
        columns = keys // self.columns
        masked, whole = (each[:, :, queries][..., columns] for each in (self.masked, self.whole))
        if torch.compiler.is_compiling():
            return masked, whole
        return None if bool(masked.all()) else masked, whole if bool(whole.any()) else None

    def _of_rows(self, start: int, rows: int) -> slice:
        return slice(start // self.rows, (start + rows - 1) // self.rows + 1)


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
    count = max(-(-keys // columns), masked[1].shape[-1])
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
        if batches not in {1, batch} or for_heads not in {1, heads} or sizes != [length, keys]:
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
    places = torch.where(listed, indices.long(), columns)  # those that do not count share a column behind the last
    table = torch.zeros((*indices.shape[:-1], columns + 1), dtype=torch.bool, device=indices.device)
    return table.scatter(-1, places, True)[..., :columns]
