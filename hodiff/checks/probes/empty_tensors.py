"""Probes of tensors with a dimension of 0, such as the last batch of filtered data: HD409, and some HD112."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from hodiff.checks.attempts import Failure, attempt
from hodiff.checks.probes.cause import Cause, no_entry
from hodiff.checks.probes.domain_edges import bad_gradient, gradients_of, values_of
from hodiff.checks.probes.function_calls import LeavesFunction
from hodiff.common.trees import tensors_in

# A rule's name, and a call that runs the rule for a function and its leaves.
Trial = tuple[str, Callable[[LeavesFunction, tuple[Tensor, ...]], Any]]

_BATCH = 2


def empty_tensors(
    f: Callable[..., Any], args: tuple[Any, ...], leaves: tuple[Tensor, ...], location: str, *, vmap: bool = True
) -> list[Cause]:
    """Set one size after the other to 0; if forward works, rules that work at the point must work, too."""
    args = _with_leaves(args, leaves)
    for size in _sizes(args):
        none = tree_map_only(Tensor, partial(_without, size), args)
        function, empty = _of_leaves(f, none)
        values = attempt(values_of, function, empty)
        if isinstance(values, Failure):
            continue
        where = f"where a dimension of size {size} is 0"
        for rule, trial in _TRIALS if vmap else _TRIALS[:-1]:
            outcome = attempt(trial, function, empty)
            # Rules that fail at the point itself have their own findings.
            if isinstance(outcome, Failure) and not isinstance(attempt(trial, *_of_leaves(f, args)), Failure):
                evidence = (f"{rule} fails {where}, which forward accepts: {outcome.message}",)
                return [Cause("HD409", evidence, no_entry, location)]
        outcome = attempt(bad_gradient, function, empty)
        if isinstance(outcome, str) and outcome:
            return [Cause("HD112", (f"{outcome} {where}",), no_entry, location, severity="warning")]
    return []


def _sizes(args: tuple[Any, ...]) -> list[int]:
    shapes = [each.shape for each in tensors_in(args)]
    return list(dict.fromkeys(size for shape in shapes for size in shape if size))


def _without(size: int, tensor: Tensor) -> Tensor:
    return tensor[tuple(slice(0) if each == size else slice(None) for each in tensor.shape)].clone()


def _with_leaves(args: tuple[Any, ...], leaves: tuple[Tensor, ...]) -> tuple[Any, ...]:
    taken = iter(leaves)
    return tree_map_only(Tensor, lambda t: next(taken) if t.is_floating_point() else t, args)


def _of_leaves(f: Callable[..., Any], args: tuple[Any, ...]) -> tuple[LeavesFunction, tuple[Tensor, ...]]:
    """Return f as a function of its floating leaves, which may have no elements, and the leaves."""
    apply = getattr(f, "apply", f) if isinstance(f, type) else f
    flat, structure = tree_flatten(args)
    places = [i for i, each in enumerate(flat) if isinstance(each, Tensor) and each.is_floating_point()]

    def function(*moving: Tensor) -> tuple[Tensor, ...]:
        filled = list(flat)
        for place, leaf in zip(places, moving, strict=True):
            filled[place] = leaf
        outputs = tensors_in(apply(*tree_unflatten(filled, structure)))
        return tuple(y for y in outputs if y.is_floating_point() or y.is_complex())

    return function, tuple(flat[i].detach().clone() for i in places)


def _tangents(function: LeavesFunction, leaves: tuple[Tensor, ...]) -> Any:
    """Run forward mode, which silently accepts tangents of a shape other than the output's."""
    pushed: Any = torch.func.jvp(function, leaves, tuple(torch.ones_like(leaf) for leaf in leaves))
    outputs, tangents = pushed
    return _require_shapes(tangents, outputs)


def _batched(function: LeavesFunction, leaves: tuple[Tensor, ...]) -> Any:
    expected = [y.expand(_BATCH, *y.shape) for y in function(*leaves)]
    stacked = tuple(torch.stack([leaf] * _BATCH) for leaf in leaves)
    return _require_shapes(torch.func.vmap(function)(*stacked), expected)


def _require_shapes(found: Any, expected: Any) -> Any:
    for a, b in zip(found, expected, strict=True):
        if a.shape != b.shape:
            raise ValueError(f"it gives shape {tuple(a.shape)} instead of {tuple(b.shape)}")
    return found


_TRIALS: tuple[Trial, ...] = (("backward", gradients_of), ("jvp", _tangents), ("vmap", _batched))
