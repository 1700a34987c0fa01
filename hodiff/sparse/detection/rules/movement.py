"""Rules for operators that move elements, by moving the numbers of the elements."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from hodiff.sparse.detection.call import Call, rule
from hodiff.sparse.detection.memory_supports import has_derivatives
from hodiff.sparse.detection.supports import Supports, joined


# A mask decides on the shape of the first two, and must not move. The last is linear too, with other arguments.
@rule("index", "masked_select", "scatter")
def moving(call: Call) -> list[Supports | None]:
    """Move numbers instead of elements: 1, 2, ... over all arguments, and 0 for constants."""
    if not all(call.is_fixed(x) for x in call.tensors if not has_derivatives(x)):
        return list(call.dense())
    parts: list[Supports] = []
    start = 1

    def numbered(x: Any) -> Any:
        nonlocal start
        if not isinstance(x, Tensor):
            return x
        if not has_derivatives(x):
            return x.cpu()
        supports = call.supports(x)
        if supports.is_empty:
            return torch.zeros(x.shape, dtype=torch.float64)
        parts.append(supports)
        start += x.numel()
        return torch.arange(start - x.numel(), start, dtype=torch.float64).reshape(x.shape)

    # Numbers up to 2^53 are exact in float64, which more operators take than int64.
    arguments = {
        name: 0 if _is_constant(name, each) else tree_map(numbered, each) for name, each in call.arguments.items()
    }
    moved = call.func(**arguments)
    if not parts:
        return [None] * len(call.outputs)
    flat = joined(parts)
    which = np.append(0, flat.which)
    return [flat.take(which[each.to(torch.int64).numpy()]) for each in tree_leaves(moved)]


def _is_constant(name: str, value: Any) -> bool:
    """Whether an argument is a number to fill with, which must not be taken for an element's number."""
    return name == "value" and not isinstance(value, Tensor)


@rule("lift_fresh", "clone", "contiguous", "detach_copy", "alias_copy")
def same(call: Call) -> list[Supports | None]:
    """Supports of a copy."""
    return [call.supports(call.tensors[0])]
