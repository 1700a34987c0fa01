"""The vectors a and g of a block, from all calls of its layer, and a comparison with the parameters' gradient."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hodiff.common.trees import describe
from hodiff.errors import InputError
from hodiff.operators.kfac import moments
from hodiff.operators.kfac.chunked_calls import Call
from hodiff.operators.kfac.layers import REMEDY, Source


def inputs_of(
    caller: str,
    source: Source,
    module: nn.Module,
    calls: Sequence[Call],
    dtype: torch.dtype,
    examples: int | None,
    *,
    chunks: bool = False,
    argument: str = "model",
    remedy: str = f"keep examples first and places in dimensions of their own, or {REMEDY}",
) -> Tensor | None:
    """Return inputs a, or None if they are 1; raise if their number of examples differs from `examples`."""
    lengths = {call.shape[0] for call in calls}
    if chunks:
        lengths = {sum(call.shape[0] for call in calls)}
    if (
        len(lengths) > 1
        or (examples is not None and lengths != {examples})
        or calls[0].x.dim() < source.kind.rank(module)
    ):
        expected = "examples" if examples is None else f"the {examples} examples"
        raise InputError(
            f"{caller}: {argument}: expected layers to take inputs with {expected} along their first dimension, got "
            f"{describe(calls[0].x)} for {source.layer!r}; {remedy}."
        )
    found = [source.inputs(module, call.x) for call in calls]
    tensors = [each for each in found if each is not None]
    if not tensors:
        return None
    a = _joined(tensors, dim=0 if chunks else 1)
    return a.to(dtype) if a.is_floating_point() else a


def gradients_of(
    source: Source,
    module: nn.Module,
    calls: Sequence[Call],
    found: Sequence[Tensor],
    dtype: torch.dtype,
    *,
    chunks: bool = False,
) -> Tensor:
    """Return gradients g from gradients (c, *shape) of the calls' outputs."""
    tensors = [source.gradients(module, call.x, g).to(dtype) for call, g in zip(calls, found, strict=True)]
    return _joined(tensors, dim=1 if chunks else 2)


def tell_the_gradient(source: Source, a: Tensor | None, g: Tensor, true: Tensor, eps: float) -> bool:
    """Whether the vectors add up to the gradient of the parameters, (1, groups, p, q)."""
    found = moments.summed_gradient(source, a, g)
    # Rounding is relative to the terms of the sum.
    terms = g.norm() * (1.0 if a is None or source.one_hot else a.norm())
    return bool((found - true).norm() <= eps**0.5 * true.norm() + min(100 * eps, 0.02) * terms)


def _joined(tensors: list[Tensor], dim: int) -> Tensor:
    """Join places, or examples, of several calls; a single call is not copied."""
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim)
