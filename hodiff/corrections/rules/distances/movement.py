"""Rules for functions that move the elements of remembered tensors $E + O n$."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hodiff.corrections.rules.distances.length_calls import Call, tensors_in
from hodiff.corrections.rules.distances.lengths import Root, even_power, remember


def moved(call: Call) -> Any:
    """Move or convert the elements of remembered tensors, perhaps together with other tensors."""
    leaves = [each for each in tensors_in(call.args, call.kwargs) if each.is_floating_point()]
    x = next((each for each in leaves if id(each) in call.found), None)
    if x is None or call.kwargs.get("out") is not None:
        return None
    graded = call.found[id(x)]
    if len(leaves) == 1 and graded.even is None:
        result = call.value()
        if result is x or not isinstance(result, Tensor):
            return x if result is x else None
        shape, device = result.shape, result.device
        # Equal moves of one length have equal keys.
        key = (*graded.root.key, call.func, repr(call.args[1:]), repr(call.kwargs)) if graded.odd is None else ()

        def zeros() -> Tensor:
            """Move the zeros of the length, as a factor or the function itself may set other elements to 0."""
            zero = call.zeros(x)
            if zero is None:
                # A reference to the result would keep it alive, as it is remembered with this function.
                return torch.zeros(shape, dtype=torch.bool, device=device)
            found: Tensor = call.value(lambda x: zero.to(x.dtype).expand(x.shape))
            return found != 0

        root = Root(
            lambda: call.value(lambda _: even_power(graded, 2)),
            key,
            graded.root.kind,
            lambda: call.value(lambda x: graded.root.label(call.length(x)).expand(x.shape)),
            zeros,
        )
        sign = _moved_signs(call, graded.odd)
        held = tuple(each for each, _ in graded.held)
        return remember(result, root, None, sign, None if sign is None else sign * result, held)
    if all(id(each) not in call.found or call.zeros(each) is None for each in leaves):
        return None
    return _moved_parts(call, leaves)


def _moved_signs(call: Call, odd: Any) -> Any:
    """Move the signs of O, as the new length is |O| n; None if O is positive everywhere."""
    if odd is None or (isinstance(odd, (int, float)) and odd > 0):
        return None
    return call.value(lambda x: torch.as_tensor(odd, dtype=x.dtype, device=x.device).detach().sign().expand(x.shape))


def _moved_parts(call: Call, leaves: list[Tensor]) -> Any:
    parts: dict[int, tuple[Tensor, ...]] = {}
    for each in leaves:
        zero = call.zeros(each) if id(each) in call.found else None
        nothing = torch.zeros_like(each.detach())
        if zero is None:
            parts[id(each)] = (each, *[nothing] * 5)
        else:
            root, length = call.found[id(each)].root, call.length(each)
            given = *call.parts(each), zero.to(each.dtype), root.square(), length, root.label(length)
            parts[id(each)] = tuple(part.to(each.dtype).expand(each.shape) for part in given)

    def each_moved(i: int) -> list[Tensor]:
        def part(x: Any) -> Any:
            return parts[id(x)][i] if id(x) in parts else x

        with call.mode:
            found = call.func(*pytree.tree_map(part, call.args), **pytree.tree_map(part, call.kwargs))
        return [found] if isinstance(found, Tensor) else list(found)

    value = call.value()
    results = []
    for each, even, odd, at, square, length, labels in zip(
        [value] if isinstance(value, Tensor) else value, *map(each_moved, range(6)), strict=True
    ):
        root = Root(square.clone, (), max(graded.root.kind for graded in call.found.values()), labels.clone)
        zero = at != 0
        root.set_zeros(zero)
        result = torch.where(zero, even + odd * length, each)
        results.append(remember(result, root, even, odd, length, ()))
    return results[0] if isinstance(value, Tensor) else type(value)(results)


def where(call: Call) -> Any:
    """Apply `torch.where`, with numbers converted to tensors."""
    if len(call.args) != 3 or call.kwargs:
        return None
    condition, *given = call.args
    if call.func is Tensor.where:
        return call.again(torch.where, call.args[1], call.args[0], call.args[2])
    dtype = next(each.dtype for each in given if isinstance(each, Tensor))
    given = [each if isinstance(each, Tensor) else torch.as_tensor(each, dtype=dtype) for each in given]
    return moved(replace(call, args=(condition, *given)))


def masked_fill(call: Call) -> Any:
    """Fill a remembered tensor where a mask is set, as `torch.where` does."""
    if len(call.args) != 3 or call.kwargs or call.graded(0) is None:
        return None
    x, mask, value = call.args
    return call.again(torch.where, mask, value, x)
