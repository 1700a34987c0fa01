"""Rules for `linspace` and `logspace`: torch treats ends that are tensors as constants."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hodiff.corrections.declining import UNNEEDED
from hodiff.corrections.registry import register
from hodiff.corrections.values import result_dtype, with_value
from hodiff.routes import ROUTES
from hodiff.torch_internals.autograd.differentiation import may_be_differentiated

_REASON = "ends that are tensors are constants to reverse mode, and raise in forward mode"


def _between(start: Any, end: Any, steps: int) -> Tensor:
    """Return evenly spaced numbers between the ends; for one step, the start."""
    ends = [each for each in (start, end) if isinstance(each, Tensor)]
    dtype = result_dtype(*ends) if len(ends) > 1 else ends[0].dtype
    weights = torch.linspace(0, 1, steps, dtype=dtype, device=ends[0].device)
    return start * (1 - weights) + end * weights


def _constant(end: Any) -> Any:
    return end.detach() if isinstance(end, Tensor) else end


def _is_needed(start: Any, end: Any, out: Any) -> bool:
    ends = [each for each in (start, end) if isinstance(each, Tensor)]
    return out is None and any(each.is_floating_point() for each in ends) and may_be_differentiated(ends)


@register(torch.linspace, routes=ROUTES, reason=_REASON, reference="convex combinations of the ends")
def _linspace(start: Any, end: Any, steps: int, *, dtype: Any = None, out: Any = None, **options: Any) -> Any:
    if not (isinstance(start, Tensor) or isinstance(end, Tensor)) or not _is_needed(start, end, out):
        return UNNEEDED
    value = torch.linspace(_constant(start), _constant(end), steps, dtype=dtype, **options)
    return with_value(_between(start, end, steps).to(value), value)


@register(torch.logspace, routes=ROUTES, reason=_REASON, reference="powers of convex combinations of the ends")
def _logspace(
    start: Any, end: Any, steps: int, base: float = 10.0, *, dtype: Any = None, out: Any = None, **options: Any
) -> Any:
    if not (isinstance(start, Tensor) or isinstance(end, Tensor)) or not _is_needed(start, end, out):
        return UNNEEDED
    value = torch.logspace(_constant(start), _constant(end), steps, base, dtype=dtype, **options)
    return with_value(torch.pow(base, _between(start, end, steps)).to(value), value)
