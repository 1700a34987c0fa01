"""Probes: defects of custom Functions that are seen by calling their rules by hand."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hodiff.checks.comparisons.judgement import Failure, attempt
from hodiff.checks.probes.buffers import device_of_plain, devices, dtypes
from hodiff.checks.probes.calls import Call, calls_of
from hodiff.checks.probes.cause import Cause
from hodiff.checks.probes.edges import edges, large_arguments
from hodiff.checks.probes.empties import empties
from hodiff.checks.probes.numbers import first_order
from hodiff.checks.probes.plain import detached
from hodiff.checks.probes.restored import restored_buffers
from hodiff.checks.probes.returns import returned, unneeded
from hodiff.checks.probes.saved import wasted
from hodiff.checks.probes.slopes import backward_slopes, forward_slopes
from hodiff.checks.probes.surroundings import kept, layouts, repeats, uninitialised, writes
from hodiff.checks.source_lines import class_location

Probe = Callable[[Call, torch.Generator], list[Cause]]
Many = Callable[..., tuple[Tensor, ...]]

# After one of these no number of a rule means anything, so that nothing is compared with it.
_UNRELIABLE = {"HD303", "HD305", "HD308", "HD309"}
# What the numbers of a surrogate would be blamed for.
_OF_FORMULAS = {"HD101", "HD102", "HD105", "HD109", "HD110", "HD111", "HD112"}

# Code that takes numbers out of tensors seldom has an idea of none.
_OFF_GRAPH = {"HD104", "HD106"}

_ROUNDED = {"HD306"}
_FORMULA = {"HD101", "HD105", "HD109", "HD110"}

# Probe, and the codes after which it has nothing to say.
PROBES: tuple[tuple[Probe, set[str]], ...] = (
    (uninitialised, set()),
    (repeats, {"HD308"}),
    (writes, set()),
    (layouts, _UNRELIABLE),
    (kept, set()),
    (returned, set()),
    (unneeded, {"HD203"}),
    (dtypes, _UNRELIABLE),
    (devices, set()),
    (first_order, _UNRELIABLE | _ROUNDED),
    # A wrong formula need not read what the right one would.
    (wasted, _FORMULA),
    (backward_slopes, _UNRELIABLE | _ROUNDED),
    (forward_slopes, _UNRELIABLE | _ROUNDED),
)


def probe(
    f: Any,
    args: tuple[Any, ...],
    function: Many,
    leaves: tuple[Tensor, ...],
    calls: list[Call],
    *,
    approximate: bool,
    seed: int,
    vmap: bool = True,
    truth: Many | None = None,
) -> list[Cause]:
    """Run every probe that makes sense; one that cannot run says nothing.

    Args:
        f: What is checked.
        args: Its arguments.
        function: Maps floating leaves to floating outputs.
        leaves: The point, float64 if f can compute in it.
        calls: The custom Functions that f calls.
        approximate: Whether f declares the derivatives of a surrogate.
        seed: Of the random numbers.
        vmap: Whether batching is asked for.
        truth: The same as function for float64, for one that knows no float64.

    Returns:
        The defects.
    """
    with warnings.catch_warnings():
        # Of points and dtypes at which nobody asked f to run.
        warnings.simplefilter("ignore")
        causes = [cause for call in calls for cause in _of_call(call, seed)]
        causes += _of_whole(f, args, function, leaves, {cause.code for cause in causes}, truth, vmap=vmap)
        if not calls:
            causes += _said(detached, function, leaves)
    return [cause for cause in causes if not (approximate and cause.code in _OF_FORMULAS)]


def _of_call(call: Call, seed: int) -> list[Cause]:
    causes: list[Cause] = []
    for each, after in PROBES:
        if not after & {cause.code for cause in causes}:
            causes += _said(each, call, torch.Generator().manual_seed(seed))
    return causes


def _of_whole(
    f: Any,
    args: tuple[Any, ...],
    function: Many,
    leaves: tuple[Tensor, ...],
    codes: set[str],
    truth: Many | None,
    *,
    vmap: bool,
) -> list[Cause]:
    location = class_location(f)
    found: list[Cause] = []
    if not _UNRELIABLE & codes:
        with restored_buffers():
            found += _said(large_arguments, function, leaves, location, truth)
            # What overflows at large arguments does so at infinite ones, and a wrong formula has no limit to keep.
            found += _said(
                partial(edges, infinite=not found and not _FORMULA & codes), function, leaves, location, truth
            )
            if not _OFF_GRAPH & codes:
                found += _said(partial(empties, vmap=vmap), f, args, leaves, location)
    if not isinstance(f, type) and "HD307" not in codes:
        found += _said(device_of_plain, f, args)
    return found


def _said(each: Callable[..., list[Cause]], *arguments: Any) -> list[Cause]:
    found = attempt(each, *arguments)
    return [] if isinstance(found, Failure) else found


__all__ = ["PROBES", "Call", "Cause", "calls_of", "probe"]
