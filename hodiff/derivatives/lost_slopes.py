"""Functions that are linear as far as the graph of their gradient tells, and whose slope depends on the point.

A backward that multiplies by a number, such as one that forward computed and kept, records its cotangent and not the
point. Whether the number is a constant, only other points show.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from types import CodeType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from hodiff.common.module_state import untouched
from hodiff.common.randomness import RandomState
from hodiff.corrections import Corrections
from hodiff.derivatives.bound_function import BoundFunction
from hodiff.derivatives.steady import draw_of
from hodiff.graphs import inspect_graph
from hodiff.recompute.cut_graphs import SeeminglyLinear, UnrecordedGradientError, lost_slope
from hodiff.recompute.reachable import named_modules
from hodiff.recompute.recording import Recording
from hodiff.torch_internals.autograd.graph_nodes import function_name
from hodiff.torch_internals.autograd.recording import in_fx_trace

# How often a Function was met, by the code of the function that calls it.
_MET: WeakKeyDictionary[CodeType, Counter[tuple[str, int]]] = WeakKeyDictionary()
# Where a slope is compared besides the point itself, at which an even one is flat.
_OFFSETS = (0.0, 0.03)


def refuse_lost_slopes(function: BoundFunction, suspects: Sequence[SeeminglyLinear]) -> None:
    """Compare the slopes of Functions at neighbouring points, at the first call and at every 2nd, 4th, 8th and so on.

    Args:
        function: The function that called them, bound at its point.
        suspects: What is linear as far as the graph tells.

    Raises:
        UnrecordedGradientError: If a slope is seen to depend on the point smoothly; jumps, and numbers that differ in
            any case, are no evidence.
    """
    code = _code(function.f)
    met = Counter() if code is None else _MET.setdefault(code, Counter())
    keys = [_key(each.node) for each in suspects]
    met.update(set(keys))
    suspects = [each for each, key in zip(suspects, keys, strict=True) if met[key] & (met[key] - 1) == 0]
    if not suspects or in_fx_trace():
        return
    draw = draw_of(function)
    seed = torch.Generator().manual_seed(0)
    probes = [[_normal_like(each, seed) for each in suspect.cotangents] for suspect in suspects]
    for offset in _OFFSETS:
        scales = [1 + leaf.detach().abs() for leaf in function.leaves]
        centre = [
            leaf.detach() + offset * scale * _normal_like(leaf, seed)
            for leaf, scale in zip(function.leaves, scales, strict=True)
        ]
        steps = [
            torch.finfo(leaf.dtype).eps ** 0.5 * scale * _normal_like(leaf, seed)
            for leaf, scale in zip(centre, scales, strict=True)
        ]
        try:
            slopes = [
                _slopes(function, [x + sign * h for x, h in zip(centre, steps, strict=True)], suspects, probes, draw)
                for sign in (-1, 0, 0, 1)
            ]
        except Exception:
            # The function need not take other points, and its own errors at them are of no interest.
            return
        for suspect, *of_one in zip(suspects, *slopes, strict=False):
            if _varies_smoothly(*of_one):
                del met[_key(suspect.node)]
                raise UnrecordedGradientError(lost_slope(suspect.node))


def _slopes(
    function: BoundFunction,
    leaves: Sequence[Tensor],
    suspects: Sequence[SeeminglyLinear],
    probes: Sequence[Sequence[Any]],
    draw: RandomState,
) -> list[Tensor]:
    """Apply the backward of each Function to its probe at a point; empty if other Functions are called there."""
    mode = Corrections(lean=True)
    with untouched(list(named_modules(function.f))), draw.replayed():
        recording = Recording(lambda primals: function.scalar(primals, mode), leaves)
    nodes = inspect_graph(recording.result[0]).functions
    found = []
    for suspect, probe in zip(suspects, probes, strict=True):
        if suspect.position >= len(nodes) or nodes[suspect.position].name() != suspect.node.name():
            return []
        node = nodes[suspect.position]
        with torch.no_grad():
            pulled = getattr(node, "apply", node)(*probe)
        parts = pulled if isinstance(pulled, tuple) else (pulled,)
        numbers = [each.detach().double().flatten() for each in parts if isinstance(each, Tensor)]
        found.append(torch.cat(numbers) if numbers else torch.zeros(1))
    return found


def _varies_smoothly(before: Tensor, here: Tensor, again: Tensor, after: Tensor) -> bool:
    """Whether a slope changes as much to one side as to the other: rounding, jumps and random numbers do not."""
    if not before.shape == here.shape == again.shape == after.shape:
        return False
    change, bend, noise = after - before, after + before - 2 * here, again - here
    small = 0.1 * change.norm()
    return bool(bend.norm() < small) and bool(noise.norm() < small) and bool(change.norm() > 1e-12 * here.norm())


def _normal_like(cotangent: Any, seed: torch.Generator) -> Any:
    return None if cotangent is None else torch.randn(cotangent.shape, generator=seed).to(cotangent.detach())


def _key(node: Any) -> tuple[str, int]:
    return function_name(node), id(type(node))


def _code(f: Any) -> CodeType | None:
    code = getattr(f, "__code__", None) or getattr(getattr(type(f), "forward", None), "__code__", None)
    return code if isinstance(code, CodeType) else None
