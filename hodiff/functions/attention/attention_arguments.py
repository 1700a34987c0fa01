"""Argument checks of attention, and grouping of heads.

Plans of attention by blocks: q, its cotangents and tangents, and some masks have rows.

The keys that queries see by position.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from hodiff.common.options import is_int, require_choice, require_number
from hodiff.errors import InputError
from hodiff.rules.arguments import broadcast, require_dense, require_dense_floating, require_one_device
from hodiff.rules.blockwise import Plan
from hodiff.torch_internals.tensors import broadcast_shape

Corner = Literal["upper-left", "lower-right"]
_CORNERS = get_args(Corner)


class Band(NamedTuple):
    """The keys that a query sees by position, as users specify them."""

    is_causal: bool = False
    window: tuple[int | None, int | None] | None = None
    corner: Corner = "upper-left"

    def bounds(self, length: int, keys: int) -> tuple[int | None, int | None]:
        """Return the least and the greatest j - i of a query i and a key j that it sees; None is no bound."""
        offset = keys - length if self.corner == "lower-right" else 0
        left, right = (None, None) if self.window is None else self.window
        if self.is_causal:
            right = 0 if right is None else min(right, 0)
        return None if left is None else offset - left, None if right is None else offset + right


def rows_plan(tensors: Any, outputs: tuple[bool, ...]) -> Plan:
    """Plan for (q, k, v, mask, seed) and further tensors; keys, values and the seed are shared."""
    q, k, _, mask = tensors[:4]
    mask_has_rows = mask is not None and mask.shape[-2] > 1
    own = (True, False, False, mask_has_rows)
    rest = {5: (), 6: (True,), 9: own, 11: (True, *own, True)}[len(tensors)]
    batch = broadcast_shape(*[each.shape[:-2] for each in (q, k, mask) if each is not None])
    return Plan(q.shape[-2], math.prod(batch) * k.shape[-2], (*own, False, *rest), outputs)


def gradient_plan(tensors: Any, wanted: Sequence[bool]) -> Plan:
    """Plan for the wanted gradients of q, k, v and the mask."""
    plan = rows_plan(tensors, ())
    return plan._replace(outputs=tuple(rows for rows, want in zip(plan.inputs[:4], wanted, strict=True) if want))


def grouped_heads(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Any, ...]:
    """View q (..., H, L, E) as (..., H_k, H / H_k, L, E), where each group shares one head of keys."""
    if min(q.dim(), k.dim(), v.dim()) < 3 or k.shape[-3] != v.shape[-3] or not divides(k.shape[-3], q.shape[-3]):
        raise InputError(
            "attention: enable_gqa: expected (..., heads, length, size) with equal heads of k and v that divide "
            f"those of q, got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}."
        )
    heads, shared = q.shape[-3], k.shape[-3]
    group = heads // max(shared, 1)
    q = q.reshape(*q.shape[:-3], shared, group, *q.shape[-2:])
    if mask is not None and mask.dim() > 2:
        pair = (1, 1) if mask.shape[-3] == 1 else (shared, group)
        mask = mask.reshape(*mask.shape[:-3], *pair, *mask.shape[-2:])
    return q, k.unsqueeze(-3), v.unsqueeze(-3), mask


def divides(shared: int, heads: int) -> bool:
    """Whether the number of shared heads divides the number of heads; 0 divides only 0."""
    return heads % shared == 0 if shared else heads == 0


def require_inputs(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> None:
    """Raise if the tensors and the `mask` argument do not fit together."""
    require_dense_floating("attention", q=q, k=k, v=v)
    if min(q.dim(), k.dim(), v.dim()) < 2 or q.shape[-1] != k.shape[-1] or k.shape[-2] != v.shape[-2]:
        shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        raise InputError(f"attention: expected q (..., L, E), k (..., S, E) and v (..., S, F), got {shapes}.")
    if not q.dtype == k.dtype == v.dtype:
        raise InputError(
            f"attention: expected q, k and v of one dtype, got {q.dtype}, {k.dtype} and {v.dtype}; Tensor.to converts."
        )
    if mask is None:
        require_one_device("attention", q=q, k=k, v=v)
        return
    if not isinstance(mask, Tensor) or not (mask.dtype == torch.bool or mask.is_floating_point()):
        got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise InputError(
            f"attention: mask: expected a boolean or floating-point tensor, got {got}; mask.bool() converts."
        )
    if mask.dtype == torch.bool:
        require_dense("attention", mask=mask)
    else:
        require_dense_floating("attention", mask=mask)
    require_one_device("attention", q=q, k=k, v=v, mask=mask)
    sizes = (q.shape[-2], k.shape[-2])
    if mask.dim() < 2 or any(m != 1 and m != n for m, n in zip(mask.shape[-2:], sizes, strict=True)):
        raise InputError(
            f"attention: mask: expected (..., L, S) with L {sizes[0]} or 1 and S {sizes[1]} or 1, "
            f"got {tuple(mask.shape)}."
        )


def require_batches(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> None:
    """Raise if batch dimensions do not broadcast."""
    named = {"q": q, "k": k, "v": v, "mask": mask}
    shapes = {name: tuple(each.shape[:-2]) for name, each in named.items() if each is not None}
    if not broadcast(*shapes.values()):
        listing = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise InputError(f"attention: expected batch dimensions that broadcast, got {listing}.")


def require_band(window: Any, corner: Any) -> None:
    """Raise if the window or the corner is invalid."""
    if window is not None:
        sides = window if isinstance(window, (tuple, list)) else ()
        if len(sides) != 2 or not all(each is None or (is_int(each) and each >= 0) for each in sides):
            raise InputError(
                "attention: window: expected None or two numbers of keys, before and after a query, got "
                f"{window!r}; None as one of them means no bound."
            )
    require_choice("attention", "causal_corner", corner, _CORNERS)


def require_options(scale: Any, dropout_p: Any) -> None:
    """Raise if the scale or the dropout probability is invalid."""
    require_number("attention", "scale", scale, optional=True, remedy="multiply q for a learned scale")
    require_number("attention", "dropout_p", dropout_p, within=(0, 1))
