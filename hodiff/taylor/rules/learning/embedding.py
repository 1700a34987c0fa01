"""Rule for embeddings."""

from __future__ import annotations

from typing import Any

import torch

from hodiff.taylor.fallback import unknown
from hodiff.taylor.registry import rule
from hodiff.taylor.series import Frame
from hodiff.taylor.substitution import value_of


@rule("nn.embedding", "embedding", analytic=True)
def embedding(frame: Frame, func: Any, *args: Any, padding_idx: Any = None, max_norm: Any = None, **_: Any) -> Any:
    """Rows of the weight; the padding row is constant."""
    # torch.embedding takes the weight first.
    first_is_weight = value_of(frame, args[0]).is_floating_point()
    weight, indices = (args[0], args[1]) if first_is_weight else (args[1], args[0])
    if not first_is_weight:
        padding_idx = args[2] if len(args) > 2 else padding_idx
        max_norm = args[3] if len(args) > 3 else max_norm
    elif len(args) > 2:
        padding_idx = args[2] if args[2] >= 0 else None
    if max_norm is not None:
        return unknown(frame, func, args, {"padding_idx": padding_idx, "max_norm": max_norm, **_})
    rows = torch.index_select(weight, 0, indices.reshape(-1)).reshape(*indices.shape, weight.shape[-1])
    if padding_idx is None:
        return rows
    padding_idx %= weight.shape[0]
    return torch.where((indices == padding_idx).unsqueeze(-1), value_of(frame, rows), rows)
