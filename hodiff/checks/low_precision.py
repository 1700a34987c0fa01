"""Functions that exist in low precision only, against a float64 reference: errors in units of their own rounding."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hodiff.checks.boundary import dtypes_of
from hodiff.checks.comparison import Failure, attempt, exact, judge
from hodiff.checks.report import Entry
from hodiff.checks.routes import Level, climb, evaluate
from hodiff.checks.scalarize import Problem
from hodiff.errors import InputError

_POINTS = 5
# Near a point; the smallest changes that every dtype resolves.
_NEAR = 4.0


def reference_problem(own: Problem, reference: Problem) -> Problem:
    """The reference at the same point, contracted in the same way."""
    double = reference.in_double()
    shapes = [tuple(u.shape) for u in own.cotangents]
    expected = [tuple(u.shape) for u in double.cotangents]
    if shapes != expected:
        raise InputError(
            f"check: reference: expected outputs of shape {shapes}, as f has, got {expected}. "
            "Pass a function of the same arguments with the same outputs."
        )
    return replace(double, directions=own.directions, cotangents=own.cotangents, weights=own.weights)


def against_reference(
    own: Problem, truth: Problem, order: int, ulps: float | None, generator: torch.Generator
) -> tuple[list[Entry], str]:
    """Compare value and derivatives by every route with the reference.

    Args:
        own: f, in its own dtype.
        truth: The reference, in float64.
        order: Highest order.
        ulps: Error allowed, in units of own rounding; by default half of the digits for each order.
        generator: Of directions.

    Returns:
        The comparisons, and a sentence about the noise.
    """
    levels = climb(truth, truth.loss, order, generator)
    entries = [_value(own, truth, ulps)]
    for level in levels:
        entries += _routes(own, level, ulps)
    noise = attempt(_noise, own, truth)
    if isinstance(noise, Failure):
        return entries, ""
    return entries, f"the value is off by {noise:.1f} ulps {dtypes_of(own)} near the inputs, by the reference"


def _value(own: Problem, truth: Problem, ulps: float | None) -> Entry:
    outcome = attempt(lambda: own.outputs(own.point).detach())
    reference = exact(truth.outputs(truth.point))
    entry = judge("f", 0, "vs reference", outcome, reference, lower=0.0, eps=own.eps, wrong="imprecise")
    return _in_ulps(entry, own.eps, ulps)


def _routes(own: Problem, level: Level, ulps: float | None) -> Iterator[Entry]:
    for route in level.outcomes:
        outcome: Any = attempt(evaluate, own.loss, route, own.point, level.tuples, level.free)
        entry = level.compare(route, "vs reference", outcome, level.truth, eps=own.eps)
        yield _in_ulps(entry, own.eps, ulps)


def _in_ulps(entry: Entry, eps: float, ulps: float | None) -> Entry:
    """A stated tolerance replaces the usual one; what the usual one lets pass is imprecise and not wrong."""
    if ulps is None or entry.error is None or entry.status not in {"ok", "wrong", "imprecise", "zero"}:
        return entry
    allowed = ulps * eps
    status = "ok" if entry.error <= allowed else "imprecise" if entry.status == "ok" else entry.status
    return replace(entry, tolerance=allowed, status=status)


def _noise(own: Problem, truth: Problem) -> float:
    """The largest error of a value near the point, in ulps of its own dtype."""
    worst = 0.0
    for k in range(_POINTS):
        t = own.point + (k - _POINTS // 2) * _NEAR * math.sqrt(own.eps) * own.step
        # The reference sees the point that f saw, after rounding.
        leaves = own.at(t)
        with torch.no_grad():
            seen, exact_values = own.function(*leaves), truth.function(*(leaf.double() for leaf in leaves))
        for y, z in zip(seen, exact_values, strict=True):
            worst = max(worst, _relative(y, z) / own.eps)
    return worst


def _relative(y: Tensor, z: Tensor) -> float:
    size = float(z.abs().max()) if z.numel() else 0.0
    return float((y.to(z) - z).abs().max()) / size if size else 0.0
