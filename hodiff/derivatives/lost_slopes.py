"""Functions whose backward takes for a constant what depends on the point.

A backward that multiplies by a number, such as one that forward computed and kept, records its cotangent and not the
point; one that also reads arguments records a part. Whether the number is a constant, only other points show.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from types import CodeType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from hodiff.common.module_state import untouched
from hodiff.common.randomness import RandomState
from hodiff.corrections import Corrections
from hodiff.derivatives.bound_function import BoundFunction
from hodiff.derivatives.own_gradient import levels_to_the_caller
from hodiff.derivatives.steady import draw_of
from hodiff.errors import HodiffWarning
from hodiff.graphs import inspect_graph
from hodiff.recompute.cut_graphs import Suspect, UnrecordedGradientError, kept_constants, lost_slope
from hodiff.recompute.reachable import named_modules
from hodiff.recompute.recording import Recording
from hodiff.torch_internals.autograd.graph_nodes import function_name, names_a_cut, replacing_kept
from hodiff.torch_internals.autograd.recording import in_fx_trace

# How often a Function was met, by the code of the function that calls it.
_MET: WeakKeyDictionary[CodeType, Counter[tuple[str, int]]] = WeakKeyDictionary()
# Functions that a warning has named, by the code of the function that calls them.
_TOLD: WeakKeyDictionary[CodeType, set[tuple[str, int]]] = WeakKeyDictionary()
# Where a slope is compared besides the point itself, at which an even one is flat.
_OFFSETS = (0.0, 0.03)


def refuse_lost_slopes(function: BoundFunction, suspects: Sequence[Suspect]) -> None:
    """Compare the slopes of Functions at neighbouring points, at the first call and at every 2nd, 4th, 8th and so on.

    Args:
        function: The function that called them, bound at its point.
        suspects: What may take for a constant what depends on the point.

    Raises:
        UnrecordedGradientError: If a slope is seen to depend smoothly on what its backward takes for a constant; jumps,
            and numbers that differ in any case, are no evidence. Where that may have been an argument without a
            gradient, which somebody has detached, it is a warning.
    """
    code = _code(function.f)
    met = Counter() if code is None else _MET.setdefault(code, Counter())
    told = set() if code is None else _TOLD.setdefault(code, set())
    keys = [_key(each.node) for each in suspects]
    met.update(set(keys))
    suspects = [
        each for each, key in zip(suspects, keys, strict=True) if met[key] & (met[key] - 1) == 0 and key not in told
    ]
    if not suspects or in_fx_trace():
        return
    draw = draw_of(function)
    seed = torch.Generator().manual_seed(0)
    probes = [
        [
            each if each is None or suspect.linear else each.requires_grad_()
            for each in (_normal_like(each, seed) for each in suspect.cotangents)
        ]
        for suspect in suspects
    ]
    for offset in _OFFSETS:
        try:
            lost = _lost_near(function, suspects, probes, draw, offset, seed)
        except Exception:
            # The function need not take other points, and its own errors at them are of no interest.
            return
        for suspect in lost:
            key, message = _key(suspect.node), lost_slope(suspect.node, linear=suspect.linear)
            if suspect.linear or not _detached_arguments(suspect.node):
                del met[key]
                raise UnrecordedGradientError(message)
            if key not in told:
                told.add(key)
                text = f"{function.caller}: {message}; an argument that was detached on purpose loses nothing"
                warnings.warn(text, HodiffWarning, stacklevel=levels_to_the_caller())


def _lost_near(
    function: BoundFunction,
    suspects: Sequence[Suspect],
    probes: Sequence[Sequence[Any]],
    draw: RandomState,
    offset: float,
    seed: torch.Generator,
) -> list[Suspect]:
    """The suspects that lose derivatives near a point, at that distance from the function's."""
    scales = [1 + leaf.detach().abs() for leaf in function.leaves]
    centre = [
        leaf.detach() + offset * scale * _normal_like(leaf, seed)
        for leaf, scale in zip(function.leaves, scales, strict=True)
    ]
    steps = [
        torch.finfo(leaf.dtype).eps ** 0.5 * scale * _normal_like(leaf, seed)
        for leaf, scale in zip(centre, scales, strict=True)
    ]
    look = partial(_look, function, suspects, probes, draw)
    # One graph at a time is kept.
    before, after = (look([x + sign * h for x, h in zip(centre, steps, strict=True)]) for sign in (-1, 1))
    here = look(centre, lambda i, _, slope, operands: _has_difference(before[i], after[i], slope, operands, steps))
    again = look(centre, lambda i, node, *_: _loses_a_part(before[i], here[i], after[i], node, probes[i]))
    return [
        suspect
        for suspect, *seen in zip(suspects, before, here, again, after, strict=True)
        if (_varies_smoothly(*(each.slope for each in seen)) if suspect.linear else seen[2].told)
    ]


class _Seen(NamedTuple):
    """A Function at a neighbouring point.

    Attributes:
        slope: The gradients that its backward returns for the probe, flattened.
        kept: The constants that it keeps.
        told: The answer to `ask`; None without one.
    """

    slope: Tensor
    kept: dict[int | str, Tensor]
    told: Any


def _look(
    function: BoundFunction,
    suspects: Sequence[Suspect],
    probes: Sequence[Sequence[Any]],
    draw: RandomState,
    leaves: Sequence[Tensor],
    ask: Callable[[int, Any, Tensor, Sequence[Tensor]], Any] | None = None,
) -> list[_Seen]:
    """Run a function at a point, and each suspect's backward on its probe; `ask` is for those that are not linear."""
    mode = Corrections(lean=True)
    with untouched(list(named_modules(function.f))), draw.replayed():
        recording = Recording(lambda primals: function.scalar(primals, mode), leaves)
    nodes = inspect_graph(recording.result[0]).functions
    found = []
    for i, (suspect, probe) in enumerate(zip(suspects, probes, strict=True)):
        node = nodes[suspect.position]
        if node.name() != suspect.node.name():
            raise LookupError("other Functions are called there")
        # A backward that can be differentiated may compute in another way.
        with torch.set_grad_enabled(not suspect.linear):
            slope = _pulled(node, probe)
            told = None
            if ask and not suspect.linear:
                # A backward that cannot be differentiated, or tensors that cannot be replaced, say nothing.
                with suppress(RuntimeError):
                    told = ask(i, node, slope, recording.operands)
        found.append(_Seen(slope.detach(), {} if suspect.linear else kept_constants(node), told))
    return found


def _has_difference(
    before: _Seen, after: _Seen, slope: Tensor, operands: Sequence[Tensor], steps: Sequence[Tensor]
) -> bool:
    """Whether the graph of a slope has its difference between two points."""
    difference = (after.slope - before.slope) / 2
    along = torch.randn(difference.shape, generator=torch.Generator().manual_seed(0)).to(difference)
    pulled = torch.autograd.grad((slope * along).sum(), operands, allow_unused=True, retain_graph=True)
    recorded = sum(float((g * h).sum()) for g, h in zip(pulled, steps, strict=True) if g is not None)
    return abs(recorded - float(difference @ along)) <= 0.01 * float((difference * along).abs().sum())


def _loses_a_part(before: _Seen, here: _Seen, after: _Seen, node: Any, probe: Sequence[Any]) -> bool:
    """Whether the slope of a Function depends on the point by more than the graph has, and by what it keeps or cuts."""
    if here.told is not False:
        return False
    if names_a_cut(node) and _varies_smoothly(before.slope, here.slope, _pulled(node, probe).detach(), after.slope):
        return True
    kept = kept_constants(node)
    # They may all be arguments, which whoever calls has detached.
    if len(kept) <= _detached_arguments(node):
        return False
    points = before.kept, here.kept, kept, after.kept
    if not _varies_smoothly(*(_flat(each.values()) for each in points)):
        return False
    try:
        replace = replacing_kept(node, kept)
    except RuntimeError:  # hooks of somebody else's, such as `save_on_cpu`, have what it saved
        return True
    slopes = []
    for each in points:
        replace(each)
        slopes.append(_pulled(node, probe).detach())
    return _varies_smoothly(*slopes)


def _detached_arguments(node: Any) -> int:
    """How many tensors without a gradient a Function was called with."""
    return sum(parent is None for parent, _ in node.next_functions)


def _pulled(node: Any, probe: Sequence[Any]) -> Tensor:
    """Run the backward of a Function on its probe, and flatten the gradients."""
    pulled = getattr(node, "apply", node)(*probe)
    return _flat(pulled if isinstance(pulled, tuple) else (pulled,))


def _flat(tensors: Iterable[Any]) -> Tensor:
    numbers = [each.double().flatten() for each in tensors if isinstance(each, Tensor)]
    return torch.cat(numbers) if numbers else torch.zeros(1)


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
