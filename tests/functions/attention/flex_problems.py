"""Problems for `flex_attention`, with a reference that uses whole matrices and torch primitives."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from drawing import draw
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from hodiff.functions import flex_attention

# Different sizes that are not multiples of the block size.
BATCH, HEADS, LENGTH, KEYS, SIZE = 2, 2, 5, 7, 2
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, 2], [0, 1, 1, 1, 2, 2, 2]])
PREFIXES = torch.tensor([3, 1])


def alibi(slopes):
    return lambda score, b, h, i, j: score - slopes[h].exp() * (i - j).abs()


def relative(table):
    return lambda score, b, h, i, j: score + table[h, i - j + KEYS - 1]


def capped(caps):
    return lambda score, b, h, i, j: caps[h] * torch.tanh(score / caps[h])


def hides_by_score(bias):
    return lambda score, b, h, i, j: torch.where(i >= j, score + bias[b, j], -math.inf)


def singular(table):
    """Return a score function that is not finite on the positions that `apart` hides."""
    return lambda score, b, h, i, j: score * score / (i - j) + table[h]


def apart(b, h, i, j):
    return i != j


def causal(b, h, i, j):
    return i >= j


def one_document(b, h, i, j):
    return DOCUMENTS[b, i] == DOCUMENTS[b, j]


def window(b, h, i, j):
    return (i - j).abs() <= 1


def prefix(b, h, i, j):
    return (j < PREFIXES[b]) | (i >= j)


def blind(b, h, i, j):
    return (i % 2 == h) & (i >= j)


def outside_gap(b, h, i, j):
    return (j < 2) | (j > 5)


def mask_of(function, rows=2, columns=2, batch=None, heads=None):
    return create_block_mask(function, batch, heads, LENGTH, KEYS, device="cpu", BLOCK_SIZE=(rows, columns))


def listed_blocks() -> tuple[BlockMask, torch.Tensor]:
    """Return a mask of listed blocks, some full and some causal, and the matrix of visible positions."""
    lists = torch.tensor([[0, 1, 2], [2, 0, 1]]), torch.tensor([[2, 1, 0], [1, 0, 2]])
    mask = BlockMask.from_kv_blocks(
        torch.tensor([[[1, 2]]], dtype=torch.int32),
        lists[0][None, None].int(),
        torch.tensor([[[1, 1]]], dtype=torch.int32),
        lists[1][None, None].int(),
        BLOCK_SIZE=3,
        mask_mod=causal,
        seq_lengths=(LENGTH, KEYS),
    )
    # Queries 0 to 2 see keys 0 to 2 causally, and key 6. Queries 3 and 4 see keys 0 to 2 and 6 causally, all of 3-5.
    seen = torch.ones(LENGTH, KEYS).tril().bool()
    seen[:3, 3:6], seen[:3, 6:] = False, True
    seen[3:, 3:6] = True
    return mask, seen


@dataclass(frozen=True)
class Problem:
    """Score and mask functions, the tensor they close over, and the visible positions (matrix or mask function)."""

    score_mod: Callable | None = None
    closed_over: torch.Tensor | None = None
    mask_mod: Callable | None = None
    block_mask: BlockMask | None = None
    seen: torch.Tensor | Callable | None = None
    heads_of_keys: int = HEADS
    options: dict = field(default_factory=dict)

    def inputs(self) -> tuple[torch.Tensor, ...]:
        """Return queries, keys, values and the tensor that is closed over."""
        keys = (BATCH, self.heads_of_keys, KEYS)
        found = draw(BATCH, HEADS, LENGTH, SIZE), draw(*keys, SIZE, seed=1), draw(*keys, 1, seed=2)
        return found if self.closed_over is None else (*found, self.closed_over)

    def ours(self, q, k, v, *closed_over):
        score_mod = None if self.score_mod is None else self.score_mod(*closed_over)
        shared = {"enable_gqa": True} if self.heads_of_keys != HEADS else {}
        return flex_attention(q, k, v, score_mod, self.mask_mod, block_mask=self.block_mask, **self.options, **shared)

    def by_primitives(self, q, k, v, *closed_over):
        k, v = (each.repeat_interleave(HEADS // self.heads_of_keys, 1) for each in (k, v))
        grid = torch.meshgrid(*(torch.arange(n) for n in (BATCH, HEADS, LENGTH, KEYS)), indexing="ij")
        seen = self.mask_mod if self.seen is None else self.seen
        seen = torch.ones((), dtype=torch.bool) if seen is None else seen(*grid) if callable(seen) else seen
        scores = q @ k.mT * self.options.get("scale", 1 / math.sqrt(SIZE))
        if self.score_mod is not None:
            scores = self.score_mod(*closed_over)(torch.where(seen, scores, 1.0), *grid)
        # The sum is zero if a query sees no key.
        seen = (seen & (scores.detach() > -math.inf)).expand_as(scores)
        weights = torch.where(seen, torch.where(seen, scores, 0.0).exp(), 0.0)
        sums = weights.sum(-1, keepdim=True)
        output = weights / torch.where(sums == 0, 1.0, sums) @ v
        return (output, sums.squeeze(-1).log()) if self.options.get("return_lse") else output


LISTED, LISTED_SEEN = listed_blocks()
TABLE = draw(HEADS, LENGTH + KEYS, seed=3)
PROBLEMS = {
    "no functions": Problem(options={"scale": 0.3}),
    "alibi": Problem(alibi, draw(HEADS, seed=3)),
    "relative bias": Problem(relative, TABLE),
    "relative bias, shared heads": Problem(relative, TABLE, heads_of_keys=1),
    "relative bias, causal blocks": Problem(relative, TABLE, block_mask=mask_of(causal), seen=causal),
    "score hides": Problem(hides_by_score, draw(BATCH, KEYS, seed=3)),
    "soft-cap": Problem(capped, draw(HEADS, seed=3).exp()),
    "soft-cap, shared heads, causal blocks": Problem(
        capped, draw(HEADS, seed=3).exp(), block_mask=mask_of(causal), seen=causal, heads_of_keys=1
    ),
    "not finite where hidden": Problem(singular, draw(HEADS, seed=3), apart),
    "documents": Problem(mask_mod=one_document),
    "documents, blocks of each batch": Problem(block_mask=mask_of(one_document, batch=BATCH), seen=one_document),
    "window": Problem(mask_mod=window),
    "window, blocks": Problem(block_mask=mask_of(window), seen=window),
    "prefix": Problem(mask_mod=prefix, heads_of_keys=1),
    "causal blocks": Problem(block_mask=mask_of(causal), seen=causal),
    "blocks larger than everything": Problem(block_mask=mask_of(causal, 128, 128), seen=causal),
    "blocks of each head, blind rows": Problem(block_mask=mask_of(blind, heads=HEADS), seen=blind),
    "blind rows, bias": Problem(relative, TABLE, mask_mod=blind),
    "blind rows, soft-cap": Problem(capped, draw(HEADS, seed=3).exp(), mask_mod=blind),
    "blocks with holes": Problem(block_mask=mask_of(outside_gap), seen=outside_gap),
    "blocks and a mask": Problem(
        mask_mod=window, block_mask=mask_of(causal), seen=lambda b, h, i, j: (i >= j) & (i - j <= 1)
    ),
    "listed blocks": Problem(relative, TABLE, block_mask=LISTED, seen=LISTED_SEEN),
    "exponents": Problem(relative, TABLE, causal, options={"return_lse": True}),
    "exponents of a soft-cap": Problem(capped, draw(HEADS, seed=3).exp(), options={"return_lse": True}),
}
