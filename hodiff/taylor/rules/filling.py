"""Rules for functions that write values to the elements of an index."""

from __future__ import annotations

from typing import Any

import torch

from hodiff.taylor.jets_in_arguments import value_of
from hodiff.taylor.registry import analytic_rule
from hodiff.taylor.rules.linear import linear_rule
from hodiff.taylor.series import Frame
from hodiff.torch_operators.table import OPERATORS

_linear_scatter = linear_rule(next(each for each in OPERATORS if each.name == "scatter"))


@analytic_rule("index_fill")
def index_fill(frame: Frame, func: Any, x: Any, dim: Any, index: Any, value: Any) -> Any:
    """Choose the value at the index; torch's index_fill writes to all directions under vmap."""
    whole = value_of(frame, x)
    chosen = torch.zeros(whole.shape, dtype=torch.bool, device=whole.device).index_fill(dim, index, True)
    filler = value.to(whole.dtype) if hasattr(value, "to") else torch.as_tensor(value, dtype=whole.dtype)
    return torch.where(chosen, filler, x)


@analytic_rule("scatter")
def scatter(frame: Frame, func: Any, x: Any, dim: Any, index: Any, src: Any, *, reduce: Any = None) -> Any:
    """Write the source or a number; a product is no linear function of its factors."""
    if reduce != "multiply":
        return _linear_scatter(frame, func, x, dim, index, src, **({} if reduce is None else {"reduce": reduce}))
    whole = value_of(frame, x)
    factors = (
        src[tuple(map(slice, index.shape))]
        if hasattr(src, "ndim")
        else torch.full(index.shape, src, dtype=whole.dtype, device=whole.device)
    )
    return torch.scatter_reduce(x, dim, index, factors, "prod")
