"""Attention with functions of positions for scores and masks; memory is linear in the lengths."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from hodiff.common.options import require_bools, require_callable, require_number
from hodiff.common.overriding import overridable_in_trees
from hodiff.errors import InputError
from hodiff.functions.attention.attention import attention
from hodiff.functions.attention.attention_arguments import divides
from hodiff.functions.attention.flex.additive import is_additive
from hodiff.functions.attention.flex.block_masks import Blocks, Seen, blocks_of, require_block_mask
from hodiff.functions.attention.flex.flex_rows import How, attend_rows
from hodiff.functions.attention.flex.positions import EVERY, Checked, Dependence, dependence
from hodiff.recompute.checkpoint import checkpointed
from hodiff.rules import blockwise
from hodiff.rules.arguments import require_dense_floating, require_one_device
from hodiff.rules.autocast import autocast_like_torch

# Rows of a block under a `BlockMask`; smaller blocks skip more keys.
_ROWS_TO_SKIP = 256
# Matrices of weights that torch's operators hold at once.
_MATRICES = 2


@overridable_in_trees
def flex_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score_mod: Callable[..., Tensor] | None = None,
    mask_mod: Callable[..., Tensor] | None = None,
    *,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
) -> Any:
    r"""Attention under functions of scores and positions, $O = \operatorname{softmax}(\phi(s\, Q K^\top))\, V$.

    $$ \phi(x)_{bhij} = \begin{cases} \text{score\_mod}(x_{bhij}, b, h, i, j) & \text{if mask\_mod}(b, h, i, j) \\
       -\infty & \text{otherwise} \end{cases} $$

    The functions have the signatures of `torch.nn.attention.flex_attention`. Derivatives of every order exist with
    respect to q, k, v and the tensors that the functions close over. Memory is linear in L and in S at every order:
    blocks of query rows are recomputed for each derivative. A function that only adds to the score, such as ALiBi or a
    relative bias, runs in the kernels of `attention`; other functions run by torch's operators. A function of the
    positions is evaluated once along the indices that it does not depend on. A row that sees no key returns zero and
    has zero derivatives. 16-bit inputs are computed in float32.

    Code that `torch.compile` traces uses one block, and the compiler plans its memory.

    Args:
        q: Floating-point tensor (B, H, L, E).
        k: Tensor (B, H, S, E); a batch of 1 broadcasts.
        v: Tensor (B, H, S, F).
        score_mod: `score_mod(score, b, h, q_idx, kv_idx)` takes tensors of one number and returns the new score.
        mask_mod: `mask_mod(b, h, q_idx, kv_idx)` returns whether a query sees a key, as a boolean tensor.
        block_mask: A `BlockMask` of torch, in addition to or instead of `mask_mod`: its function decides in the blocks
            that it lists, its full blocks are seen whole, and keys that a block of rows does not see cost nothing.
        scale: Factor s of the scores, $1 / \sqrt{E}$ by default.
        enable_gqa: Whether the heads of k and v are each shared by several consecutive heads of q.
        return_lse: Whether to return $\log \sum_j \exp \phi(x)_{bhij}$ as well; uses torch's operators.

    Returns:
        Tensor (B, H, L, F) of the dtype of q; with `return_lse`, it and a tensor (B, H, L), -inf for rows that see
        nothing, in float32 or float64.

    Raises:
        InputError: If shapes, dtypes or options do not fit, or a function does not return one number.

    Example:
        >>> import torch
        >>> q, k, v = torch.eye(2)[None, None], torch.zeros(1, 1, 2, 2), torch.tensor([[1.0], [3.0]])[None, None]
        >>> flex_attention(q, k, v, mask_mod=lambda b, h, i, j: i >= j)[0, 0]
        tensor([[1.],
                [2.]])
        >>> slopes = torch.tensor([1.0], requires_grad=True)
        >>> y = flex_attention(q, k, v, lambda x, b, h, i, j: x - slopes[h] * (i - j).abs())
        >>> torch.autograd.grad(y[0, 0, 0, 0], slopes)
        (tensor([-0.3932]),)

    Source: J. Dong, B. Feng, D. Guessous, Y. Liang, H. He, "Flex attention: a programming model for generating
    optimized attention kernels", 2024, section 3.
    """
    require_bools("flex_attention", enable_gqa=enable_gqa, return_lse=return_lse)
    output, lse, _ = attend_flexibly(q, k, v, score_mod, mask_mod, block_mask, scale, enable_gqa, statistics=return_lse)
    return (output, lse) if return_lse else output


def attend_flexibly(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score_mod: Any,
    mask_mod: Any,
    block_mask: Any,
    scale: float | None,
    enable_gqa: bool,
    *,
    statistics: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the output and, if wanted, the log-sum-exps and the greatest scores, which are constants."""
    require_number("flex_attention", "scale", scale, optional=True, remedy="multiply q for a learned scale")
    functions = {"score_mod": score_mod, "mask_mod": mask_mod}
    require_callable("flex_attention", **{name: each for name, each in functions.items() if each is not None})
    batch, heads = _require_shapes(q, k, v, enable_gqa)
    blocks = in_blocks = None
    if block_mask is not None:
        length, keys = q.shape[-2], k.shape[-2]
        require_block_mask(block_mask, batch, heads, length, keys, q.device)
        in_blocks = block_mask.mask_mod
        masked = block_mask.kv_num_blocks, block_mask.kv_indices
        whole = block_mask.full_kv_num_blocks, block_mask.full_kv_indices
        blocks = blocks_of(masked, whole, block_mask.BLOCK_SIZE, length, keys)
    return attend_in_blocks(q, k, v, score_mod, (in_blocks, mask_mod), blocks, scale, statistics=statistics)


def attend_in_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score_mod: Any,
    mask_mods: tuple[Any, Any],
    blocks: Blocks | None,
    scale: float | None,
    *,
    statistics: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """`attend_flexibly` for checked arguments and two masks: one inside blocks, and one everywhere."""
    q, k, v = autocast_like_torch(q, k, v)
    batch, heads, length, keys = max(q.shape[0], k.shape[0], v.shape[0]), q.shape[1], q.shape[2], k.shape[2]
    scale = 1 / math.sqrt(max(q.shape[-1], 1)) if scale is None else float(scale)
    if any(size == 0 for size in (batch, heads, length, keys)):
        return _of_nothing(scale, q, k, v)
    if score_mod is None and mask_mods == (None, None) and blocks is None and not statistics:
        return attention(q, k, v, scale=scale, enable_gqa=k.shape[1] != heads), None, None
    q, k, v = (each.expand(batch, *each.shape[1:]) for each in (q, k, v))
    score_mod = None if score_mod is None else Checked("score_mod", score_mod)
    first, second = (None if each is None else Checked("mask_mod", each) for each in mask_mods)
    mask_mods = (first, second)
    adds, hides = _adds(score_mod, q), (_hides(first, q), _hides(second, q))
    how = How(batch, heads, scale, adds, hides, statistics)
    found = [
        _block(score_mod, mask_mods, how, blocks, start, q.narrow(-2, start, rows), k, v)
        for start, rows in _pieces(how, score_mod, mask_mods, blocks, length, keys)
    ]
    output, *rest = (parts[0] if len(parts) == 1 else torch.cat(parts, 2) for parts in zip(*found, strict=True))
    return (output, rest[0], rest[1]) if statistics else (output, None, None)


def _require_shapes(q: Any, k: Any, v: Any, enable_gqa: bool) -> tuple[int, int]:
    """Raise if the tensors do not fit together; return the batch size and the number of heads of q."""
    require_dense_floating("flex_attention", q=q, k=k, v=v)
    require_one_device("flex_attention", q=q, k=k, v=v)
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if {q.dim(), k.dim(), v.dim()} != {4} or q.shape[-1] != k.shape[-1] or k.shape[1:-1] != v.shape[1:-1]:
        raise InputError(
            f"flex_attention: expected q (B, H, L, E), k (B, H, S, E) and v (B, H, S, F), got {shapes}; unsqueeze "
            "adds batch and head dimensions."
        )
    sizes = [each.shape[0] for each in (q, k, v)]
    batch = 0 if 0 in sizes else max(sizes)
    if any(size != 1 and size != batch for size in sizes):  # symbolic sizes have no hash
        raise InputError(f"flex_attention: expected batches that broadcast, got {shapes}.")
    heads, shared = q.shape[1], k.shape[1]
    if heads != shared and (not enable_gqa or not divides(shared, heads)):
        raise InputError(
            f"flex_attention: expected as many heads of k and v as of q, or with enable_gqa=True a number that divides "
            f"it, got {shapes} and enable_gqa={enable_gqa}."
        )
    if not q.dtype == k.dtype == v.dtype:
        raise InputError(
            f"flex_attention: expected q, k and v of one dtype, got {q.dtype}, {k.dtype} and {v.dtype}; Tensor.to "
            f"converts."
        )
    return batch, heads


def _adds(score_mod: Any, q: Tensor) -> Dependence | None:
    """Return the indices on which the term added by `score_mod` depends; None if it does more than add."""
    if score_mod is None or torch.compiler.is_compiling():
        return None
    dtype = torch.promote_types(q.dtype, torch.float32)
    if not is_additive(score_mod.function, dtype, q.device):
        return None
    return dependence(score_mod, q.device, torch.zeros((), dtype=dtype, device=q.device))


def _hides(mask_mod: Any, q: Tensor) -> Dependence:
    """Return the indices on which a mask depends."""
    return EVERY if mask_mod is None or torch.compiler.is_compiling() else dependence(mask_mod, q.device)


def _pieces(how: How, score_mod: Any, mask_mods: Any, blocks: Any, length: int, keys: int) -> Iterator[tuple[int, int]]:
    """Yield the first row and the number of rows of each block."""
    if torch.compiler.is_compiling():
        yield 0, length
        return
    width = 0
    if how.statistics or (score_mod is not None and how.adds is None):
        width = _MATRICES * how.batch * how.heads
    for function, varies in zip((score_mod, *mask_mods), (how.adds, *how.hides), strict=True):
        if function is not None and varies is not None:
            width = max(width, math.prod(n for n, each in zip(how[:2], varies[:2], strict=True) if each))
    if blocks is not None:
        width = max(width, math.prod(blocks.masked.shape[:2]))
    rows = max(blockwise.FEWEST_ROWS, blockwise.BLOCK // (max(width, 1) * keys))
    if blocks is not None:
        rows = min(rows, max(_ROWS_TO_SKIP, blocks.rows))
        rows = rows - rows % blocks.rows if rows > blocks.rows else rows
    for start in range(0, length, rows):
        yield start, min(rows, length - start)


def _block(
    score_mod: Any, mask_mods: Any, how: How, blocks: Blocks | None, start: int, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, ...]:
    """Compute a block of rows by checkpointing, which saves only its operands."""
    count = k.shape[-2]
    keys = Seen(0, count) if blocks is None else blocks.seen(start, q.shape[-2], count)
    if not torch.compiler.is_compiling() and not keys.total:
        found = _of_nothing(how.scale, q, k[..., :0, :], v[..., :0, :])
        return found if how.statistics else found[:1]
    attend = partial(attend_rows, score_mod, mask_mods, how, start)
    result: tuple[Tensor, ...] = checkpointed("flex_attention", attend, (keys, q, k, v), {})
    return result


def _of_nothing(scale: float, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the results without keys or without rows: zeros, and -inf for the statistics."""
    shared = max(k.shape[1], 1)
    grouped = q.reshape(q.shape[0], shared, q.shape[1] // shared, *q.shape[2:])
    output = ((scale * grouped @ k.unsqueeze(2).mT) @ v.unsqueeze(2)).flatten(1, 2)
    nothing = torch.full(
        output.shape[:-1], -math.inf, dtype=torch.promote_types(q.dtype, torch.float32), device=q.device
    )
    return output, nothing, nothing
