"""Piecewise functions of lengths that are 0: each direction of a pass leads to another piece of the function."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

from hodiff.errors import HodiffWarning, levels_to_the_caller
from hodiff.taylor.jets import Jet, new_jet
from hodiff.taylor.jets_in_arguments import call, value_of
from hodiff.taylor.registry import name_of
from hodiff.taylor.series import Frame, filled
from hodiff.torch_internals.autograd.wrapped_tensors import any_holds
from hodiff.torch_operators.table import OPERATORS

# The rule of abs follows the side of a length itself.
PIECEWISE = {each.name for each in OPERATORS if each.pieces} - {"abs"}
# The same of hodiff.functions.
PIECEWISE_OF_HODIFF = ("relu", "clipped_relu", "fused_add_relu", "soft_threshold", "hinge", "huber", "amax")
PIECEWISE |= {f"functions.{name}" for name in PIECEWISE_OF_HODIFF}


def along_each_side(
    frame: Frame, apply: Callable[..., Any], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run the rule of a piecewise function beside the point, where arguments move on this side of a length 0."""

    def beside(row: int | None) -> Any:
        return apply(func, *pytree.tree_map_only(Jet, partial(_beside, frame, row), (args, kwargs)))

    # Each direction may lead to another piece of the function.
    rows = range(frame.directions or 0) if frame.has_axis(1) else [None]
    results = [pytree.tree_leaves(beside(row)) for row in rows]
    values, structure = pytree.tree_flatten(call(func, value_of(frame, args), value_of(frame, kwargs)))
    found = [
        _by_direction(frame, name_of(func), value, parts) if isinstance(parts[0], Jet) else value
        for value, parts in zip(values, zip(*results, strict=True), strict=True)
    ]
    return pytree.tree_unflatten(found, structure)


def _by_direction(frame: Frame, name: str, value: Any, results: Sequence[Jet]) -> Jet:
    """Return the jet whose derivatives along each direction are those of the result for this direction."""
    found = [value]
    for k in range(1, frame.order + 1):
        parts = [filled(frame, each.coefficients, k, value) for each in results]
        if frame.has_axis(k):
            found.append(torch.stack([part[row] for row, part in enumerate(parts)]))
            continue
        unequal = functools.reduce(torch.logical_or, [part != parts[0] for part in parts])
        if any_holds(unequal & ~parts[0].isnan()):
            warnings.warn(
                f"{name}: Got a length that is 0. The branch of the function depends on the direction there, so "
                "derivatives are NaN. Compare squares of lengths instead.",
                HodiffWarning,
                stacklevel=levels_to_the_caller(),
            )
        found.append(torch.where(unequal, torch.nan, parts[0]))
    return new_jet(frame, found)


def _beside(frame: Frame, row: int | None, jet: Jet) -> Jet:
    """Move the value of a jet by some last digits along its slope in one direction."""
    if not jet.is_kinked:
        return jet
    value, slope = jet.value, frame.kink.side * filled(frame, jet.coefficients, 1, jet.value)
    digit = torch.finfo(value.dtype)
    step = torch.clamp(2**8 * digit.eps * value.abs(), min=2**8 * digit.tiny)
    move = step * torch.clamp(slope if row is None else slope[row], -(2.0**8), 2.0**8)
    return new_jet(frame, [value + move, *jet.coefficients[1:]])
