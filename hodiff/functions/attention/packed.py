"""Attention of concatenated sequences of different lengths, without padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hodiff.common.options import is_int
from hodiff.common.overriding import overridable
from hodiff.errors import InputError
from hodiff.functions.attention.attention import attention
from hodiff.functions.attention.attention_arguments import Corner
from hodiff.rules.arguments import require_dense_floating, require_one_device


@overridable
def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Sequence[int] | Tensor,
    key_lengths: Sequence[int] | Tensor | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    generator: torch.Generator | None = None,
    enable_gqa: bool = False,
    window: tuple[int | None, int | None] | None = None,
    causal_corner: Corner = "upper-left",
    softcap: float | None = None,
) -> Tensor:
    r"""Attention within each of several sequences, $O_n = \operatorname{softmax}(s\, Q_n K_n^\top)\, V_n$, packed.

    The sequences are concatenated in dimension -2, without padding. The cost, also of derivatives of all orders, is the
    sum of the costs of the sequences, not the square of their total length. Positions are counted within a sequence.
    With dropout, each sequence draws its own seed.

    Args:
        q: Floating-point tensor (..., L, E), where L is the sum of the lengths.
        k: Tensor (..., S, E), where S is the sum of `key_lengths`.
        v: Tensor (..., S, F).
        lengths: Number of queries of each sequence.
        key_lengths: Number of keys of each sequence; by default, as many as queries.
        scale: Factor of the scores. This and all options below are the options of `attention`.
        is_causal: Whether a query sees only the keys up to its own position.
        dropout_p: Probability that a weight is dropped. Requires a `generator`.
        generator: Generator from which dropout draws its seeds.
        enable_gqa: Whether heads of k and v are shared by several heads of q.
        window: Numbers of keys before and after its own position that a query sees.
        causal_corner: Alignment of positions.
        softcap: Bound of the scores.

    Returns:
        Tensor (..., L, F).

    Raises:
        InputError: If lengths are not counts, or do not sum to the sizes of the tensors, or if `attention` raises.

    Example:
        >>> import torch
        >>> v = torch.tensor([[1.0], [3.0], [5.0]])
        >>> packed_attention(torch.zeros(3, 2), torch.zeros(3, 2), v, lengths=[2, 1])
        tensor([[2.],
                [2.],
                [5.]])

    Source: M. Krell et al., "Efficient sequence packing without cross-contamination", 2021, section 3.2.
    """
    require_dense_floating("packed_attention", q=q, k=k, v=v)
    require_one_device("packed_attention", q=q, k=k, v=v)
    rows = _counts("lengths", lengths, q, "q")
    keys = _counts("key_lengths", lengths if key_lengths is None else key_lengths, k, "k")
    if len(rows) != len(keys):
        raise InputError(
            f"packed_attention: key_lengths: expected one for each of {len(rows)} lengths, got {len(keys)}; use 0 for "
            "a sequence without keys."
        )
    if v.dim() < 2 or v.shape[-2] != k.shape[-2]:
        raise InputError(
            f"packed_attention: v: expected as many rows in dimension -2 as k {tuple(k.shape)}, got {tuple(v.shape)}."
        )
    options: dict[str, Any] = {
        "scale": scale,
        "is_causal": is_causal,
        "dropout_p": dropout_p,
        "generator": generator,
        "enable_gqa": enable_gqa,
        "window": window,
        "causal_corner": causal_corner,
        "softcap": softcap,
    }
    if not rows:
        return attention(q, k, v, **options)
    pieces = zip(q.split(rows, -2), k.split(keys, -2), v.split(keys, -2), strict=True)
    return torch.cat([attention(*each, **options) for each in pieces], -2)


def _counts(argument: str, given: Any, tensor: Tensor, name: str) -> list[int]:
    found = given.tolist() if isinstance(given, (Tensor, np.ndarray)) else given
    found = list(found) if isinstance(found, Sequence) else None
    if found is None or not all(is_int(each) and each >= 0 for each in found):
        raise InputError(f"packed_attention: {argument}: expected lengths of 0 or more, got {given!r}.")
    if tensor.dim() < 2 or sum(found) != tensor.shape[-2]:
        raise InputError(
            f"packed_attention: {argument}: expected lengths whose sum is the size of dimension -2 of {name}, got "
            f"{sum(found)} and "
            f"{name} {tuple(tensor.shape)}; pass the lengths of single sequences, not cumulative sums."
        )
    return [int(each) for each in found]
