"""Functions that move elements: indices of directions move with the elements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from hodiff.taylor.jets import Jet, new_jet
from hodiff.taylor.series import Frame
from hodiff.taylor.sparsity.moving_directions import Support, support
from hodiff.taylor.sparsity.remembering import MEMORY, size_of
from hodiff.taylor.sparsity.slots import Call, moves
from hodiff.torch_internals.autograd.wrapped_tensors import is_wrapped, numbers_in
from hodiff.torch_internals.compilers.tracing import for_later_calls

# Calls with constant arguments of more elements are not cached, and use all directions.
MOST_ELEMENTS = 1 << 16


def moving(call: Call) -> Any:
    """Run the rule on as many slots as the widest jet has."""
    key = _key(call) if call.sparse else None
    if key is None:
        return NotImplemented
    slots = max(jet.support.slots for jet in call.jets if moves(jet))
    inner = call.inner_frame(slots)
    args, kwargs = call.with_jets([_widened(jet, inner, slots) for jet in call.jets])
    result = call.entry.rule(inner, call.func, *args, **kwargs)
    parts, spec = pytree.tree_flatten(result)
    supports = _supports(call, key, slots)
    found = [_outward(call.frame, inner, part, own) for part, own in zip(parts, supports, strict=True)]
    return pytree.tree_unflatten(found, spec)


def _outward(frame: Frame, inner: Frame, part: Any, own: Support | None) -> Any:
    """Convert a result to a jet with its support; a result without elements has no derivatives."""
    if not isinstance(part, Jet) or part.frame is not inner:
        return part
    return new_jet(frame, [part.value, *[None] * frame.order] if own is None else part.coefficients, own)


def _widened(jet: Jet, inner: Frame, slots: int) -> Jet:
    """Append empty slots to a jet."""
    parts = []
    for k, each in enumerate(jet.in_slots()):
        if each is not None and jet.frame.has_axis(k) and len(each) < slots:
            each = torch.cat((each, each.new_zeros((slots - len(each), *each.shape[1:]))))
        parts.append(each)
    return new_jet(inner, parts)


def _supports(call: Call, key: Any, slots: int) -> list[Support | None]:
    """Return the support of each result, from the cache if possible."""
    found = MEMORY.find(key)
    if found is None:
        supports = _moved(call, slots)
        MEMORY.keep(key, supports, size_of(key) + size_of(supports))
        return supports
    known: list[Support | None] = found[0]
    return known


def _moved(call: Call, slots: int) -> list[Support | None]:
    """Run the function on indices instead of first coefficients, where 0 means none."""
    inner = Frame(1, slots, False, call.frame.depth, call.frame.handle)
    directions = next(jet.support.directions for jet in call.jets if moves(jet))
    with for_later_calls():
        args, kwargs = call.with_jets([_indices(jet, inner, slots) for jet in call.jets])
        parts = pytree.tree_leaves(call.entry.rule(inner, call.func, *args, **kwargs))
        return [
            support(_numbers(part, slots), directions) if isinstance(part, Jet) and part.value.numel() else None
            for part in parts
        ]


def _indices(jet: Jet, inner: Frame, slots: int) -> Jet:
    shape = tuple(jet.value.shape)
    table = np.zeros((slots, *shape))
    if moves(jet):
        table[: jet.support.slots] = jet.support.index + 1
    device = jet.value.device
    return new_jet(
        inner,
        [torch.zeros(shape, dtype=torch.float64, device=device), torch.as_tensor(table, device=device)],
    )


def _numbers(part: Jet, slots: int) -> Any:
    _, found = part.coefficients
    if found is None:
        return np.full((slots, *part.value.shape), -1)
    return found.cpu().numpy().astype(np.int64) - 1


def _key(call: Call) -> Any:
    """Return a cache key of everything that decides where elements go; None if it cannot be known."""
    parts: list[Any] = [call.entry.name, call.func, str(call.spec)]
    for each in call.leaves:
        if isinstance(each, Jet):
            # The key keeps supports alive, so that their identities are not reused.
            parts.append((each.support if moves(each) else None, tuple(each.value.shape)))
        elif isinstance(each, torch.Tensor):
            if is_wrapped(each) or each.numel() > MOST_ELEMENTS:
                return None
            integer = not (each.is_floating_point() or each.is_complex())
            parts.append((tuple(each.shape), each.dtype, numbers_in(each).tobytes() if integer else b""))
        elif isinstance(each, np.ndarray):
            parts.append((each.shape, str(each.dtype), each.tobytes()))
        elif isinstance(each, slice):
            parts.append(("slice", str(each)))
        elif each is None or isinstance(each, _SIMPLE):
            parts.append((type(each), each))
        else:
            return None
    return tuple(parts)


_SIMPLE = (int, float, str, type(...), torch.dtype, torch.device, torch.memory_format, torch.layout, np.generic)


def sequence(x: Any) -> tuple[int, ...]:
    """Return dimensions, given as one or several, as a tuple."""
    return tuple(x) if isinstance(x, Sequence) else (x,)
