r"""Scaled dot-product attention whose memory is linear in the sequence length, with derivatives of every order.

The formulas run over blocks of query rows and hold the weights of one block at a time. Backward, forward mode and their
derivatives recompute the weights.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from hodiff.common.options import require_bools, require_generator, require_number
from hodiff.common.overriding import overridable
from hodiff.distributed.layouts import any_distributed
from hodiff.errors import InputError
from hodiff.functions.attention.attention_arguments import (
    Band,
    Corner,
    grouped_heads,
    require_band,
    require_batches,
    require_inputs,
    require_options,
)
from hodiff.functions.attention.attention_function import apply
from hodiff.functions.attention.sharded import by_shards
from hodiff.kernels.attention.options import Options
from hodiff.rules.autocast import autocast_like_torch
from hodiff.torch_internals.tensors import broadcast_shape


@overridable
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    scale: float | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    generator: torch.Generator | None = None,
    enable_gqa: bool = False,
    *,
    window: tuple[int | None, int | None] | None = None,
    causal_corner: Corner = "upper-left",
    softcap: float | None = None,
) -> Tensor:
    r"""Scaled dot-product attention, $O = \operatorname{softmax}(s\, Q K^\top + M)\, V$.

    Memory is linear in L and in S at every order: q, k, v and the mask are saved, and the weights are recomputed by
    blocks of rows, in compiled code as well. DTensors are computed by shards of heads or of a batch. On a CPU, the
    value, the gradient and the tangents of both run in compiled kernels. A row that sees no key returns zero and has
    zero derivatives. 16-bit inputs are computed in float32.

    Args:
        q: Floating-point tensor (..., L, E).
        k: Tensor (..., S, E); batch dimensions broadcast.
        v: Tensor (..., S, F).
        mask: Tensor that broadcasts with (..., L, S): boolean, True where a query sees a key, or floating-point, added
            to the scores (-inf hides a key) and differentiated.
        scale: Factor s of the scores, $1 / \sqrt{E}$ by default.
        is_causal: Whether a query sees only the keys up to its own position, in addition to the mask.
        dropout_p: Probability that a weight is dropped; other weights are divided by 1 - p. Requires a `generator`.
        generator: Generator from which dropout draws one seed per call; all derivatives of the call drop the same
            weights.
        enable_gqa: Whether the heads of k and v, dimension -3, are each shared by several consecutive heads of q.
        window: Numbers of keys before and after its own position that a query sees, None for all; only these keys cost
            time.
        causal_corner: Alignment of positions: "upper-left" aligns the first query and key, as torch does; "lower-right"
            aligns the last query and key, as for queries that continue a cache.
        softcap: Bound c of the scores before the mask, $c \tanh(x / c)$.

    Returns:
        Tensor (..., L, F).

    Raises:
        InputError: If shapes, dtypes, devices or options do not fit.

    Example:
        >>> import torch
        >>> q, k, v = torch.eye(2), torch.zeros(2, 2), torch.tensor([[1.0], [3.0]])
        >>> attention(q, k, v)
        tensor([[2.],
                [2.]])
        >>> attention(q, k, v, is_causal=True)
        tensor([[1.],
                [2.]])

    Source: A. Vaswani et al., "Attention is all you need", 2017, equation 1; M. N. Rabe & C. Staats, "Self-attention
    does not need O(n²) memory", 2021, for the blocks.
    """
    require_options(scale, dropout_p)
    require_bools("attention", is_causal=is_causal, enable_gqa=enable_gqa)
    require_generator("attention", "generator", generator)
    if dropout_p and generator is None:
        raise InputError(
            "attention: generator: expected a torch.Generator if dropout_p is not 0, got None; "
            "torch.Generator(device).manual_seed(0) makes one."
        )
    require_band(window, causal_corner)
    require_number("attention", "softcap", softcap, optional=True, positive=True, finite=True)
    band = Band(is_causal, window, causal_corner)
    return attend(q, k, v, mask, scale, band, dropout_p, generator, enable_gqa, softcap)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float | None,
    band: Band,
    dropout_p: float,
    generator: torch.Generator | None,
    enable_gqa: bool,
    softcap: float | None = None,
) -> Tensor:
    """`attention` with checked options, and torch's own generator for the seed of dropout if none is given."""
    if isinstance(mask, Tensor) and mask.dim() < 2:
        mask = mask[(None,) * (2 - mask.dim())]
    compiling = torch.compiler.is_compiling()
    if not compiling and any_distributed((q, k, v, mask)):

        def local(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
            return attend(q, k, v, mask, scale, band, 0.0, None, enable_gqa, softcap)

        return by_shards(local, q, k, v, mask, dropout_p, enable_gqa=enable_gqa)
    require_inputs(q, k, v, mask)
    q, k, v, mask = autocast_like_torch(q, k, v, mask)
    if enable_gqa:
        q, k, v, mask = grouped_heads(q, k, v, mask)
    require_batches(q, k, v, mask)
    # Make ranks equal, so that a batch of vmap in front of all tensors still broadcasts.
    rank = max(q.dim(), k.dim(), v.dim(), 0 if mask is None else mask.dim())
    # Dynamo needs different tensors, even if one is given twice.
    aligned: Any = [
        x if x is None or (x.dim() == rank and not compiling) else x[(None,) * (rank - x.dim())]
        for x in (q, k, v, mask)
    ]
    q, k, v, mask = aligned
    batch = tuple(broadcast_shape(*[each.shape[:-2] for each in (q, k, mask) if each is not None]))
    scale = 1 / math.sqrt(max(q.shape[-1], 1)) if scale is None else scale
    # Sizes may be symbols, which have no hash and no order.
    if 0 in batch or q.shape[-2] == 0 or k.shape[-2] == 0:
        output = (scale * q @ k.mT) @ v
    else:
        seed = _seed(generator, rank, q.device) if dropout_p else None
        low, high = band.bounds(q.shape[-2], k.shape[-2])
        cap = None if softcap is None else float(softcap)
        options = Options(float(scale), low, high, cap, float(dropout_p), batch)
        output = apply(q, k, v, mask, seed, options)
    return output.flatten(-4, -3) if enable_gqa else output


def _seed(generator: torch.Generator | None, rank: int, device: torch.device) -> Tensor:
    source = generator.device if generator is not None else device
    return torch.randint(2**32, (1,) * rank, generator=generator, device=source).to(device)
