"""Comparison of low-precision functions with a float64 reference, in units of their own rounding."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from hodiff.checks.attempts import Failure, attempt
from hodiff.checks.comparisons.judgement import exact, judge
from hodiff.checks.comparisons.order_by_order import Level, climb, evaluate_route
from hodiff.checks.comparisons.scalar_problem import ScalarProblem
from hodiff.checks.comparisons.scalar_requirements import UnrepeatableError
from hodiff.checks.comparisons.scalarize import scalarize
from hodiff.checks.probes.function_calls import FunctionCall
from hodiff.checks.report.data import Entry
from hodiff.errors import InputError

_POINTS = 5
# Distance of the points around the given point, in units of the square root of the rounding.
_NEAR = 4.0


def reference_problem(
    own: ScalarProblem, reference: Callable[..., Any], args: tuple[Any, ...], generator: torch.Generator
) -> ScalarProblem:
    """Return the reference in float64, at the point of f and contracted with the cotangents of f."""
    try:
        double = scalarize(reference, tree_map_only(Tensor, _double, args), generator).in_double()
    except InputError as error:
        # The reference must meet the same requirements as f, so the message names it instead of f.
        raise InputError(str(error).replace("check: f", "check: reference", 1)) from error.__cause__
    except UnrepeatableError as error:
        raise InputError(
            f"check: reference: expected a deterministic function, but {error}. Pass random numbers as an input."
        ) from None
    shapes = [tuple(u.shape) for u in own.cotangents]
    expected = [tuple(u.shape) for u in double.cotangents]
    if shapes != expected:
        raise InputError(
            f"check: reference: expected outputs of shape {shapes}, as f has, got {expected}. "
            "Pass a function of the same arguments with the same outputs."
        )
    return replace(double, directions=own.directions, cotangents=own.cotangents, weights=own.weights)


def _double(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def with_truth(calls: list[FunctionCall], f: Any, reference: Callable[..., Any]) -> list[FunctionCall]:
    """Attach the reference to the call of f itself if f is a custom Function, as both have the same arguments."""
    function = f if isinstance(f, type) else getattr(f, "__self__", None)
    return [replace(call, truth=reference) if call.function is function else call for call in calls]


def against_reference(
    own: ScalarProblem,
    truth: ScalarProblem,
    levels: list[Level],
    order: int,
    ulps: float | None,
    generator: torch.Generator,
) -> list[Entry]:
    """Compare values and derivatives by every route with the reference; ulps replace the usual tolerance."""
    entries = [_value(own, truth, ulps)]
    for level in levels:
        entries += (_in_ulps(entry, own.eps, ulps) for entry in _routes(own, own.loss, level, "vs reference"))
    # At first order a curved loss shows nothing new. Its terms may cancel, so ulps do not apply.
    for level in climb(truth, truth.curved_loss, order, generator)[1:]:
        entries += _routes(own, own.curved_loss, level, "curved loss")
    return entries


def noise_note(own: ScalarProblem, truth: ScalarProblem) -> Iterator[str]:
    """Yield a sentence with the error of the value near the point."""
    noise = attempt(_noise, own, truth)
    if not isinstance(noise, Failure):
        yield f"the value is off by {noise:.1f} ulps in {own.dtypes} near the inputs, by the reference"


def _value(own: ScalarProblem, truth: ScalarProblem, ulps: float | None) -> Entry:
    outcome = attempt(lambda: own.joined_outputs(own.point).detach())
    reference = exact(truth.joined_outputs(truth.point))
    entry = judge("f", 0, "vs reference", outcome, reference, lower=0.0, eps=own.eps, wrong="imprecise")
    return _in_ulps(entry, own.eps, ulps)


def _routes(own: ScalarProblem, loss: Callable[[Tensor], Tensor], level: Level, quantity: str) -> Iterator[Entry]:
    for route in level.outcomes:
        outcome: Any = attempt(evaluate_route, loss, route, own.point, level.tuples, level.free)
        yield level.compare(route, quantity, outcome, level.truth, eps=own.eps)


def _in_ulps(entry: Entry, eps: float, ulps: float | None) -> Entry:
    """Replace the tolerance by the stated ulps; errors that pass only the usual tolerance are imprecise."""
    if ulps is None or entry.error is None or entry.status not in {"ok", "wrong", "imprecise", "zero"}:
        return entry
    allowed = ulps * eps
    status = "ok" if entry.error <= allowed else "imprecise" if entry.status == "ok" else entry.status
    return replace(entry, tolerance=allowed, status=status)


def _noise(own: ScalarProblem, truth: ScalarProblem) -> float:
    """Return the largest error of a value near the point, in ulps of its own dtype."""
    worst = 0.0
    for k in range(_POINTS):
        t = own.point + (k - _POINTS // 2) * _NEAR * math.sqrt(own.eps) * own.step
        # Evaluate the reference at the rounded point of f.
        leaves = own.at(t)
        with torch.no_grad():
            seen, exact_values = own.function(*leaves), truth.function(*(leaf.double() for leaf in leaves))
        for y, z in zip(seen, exact_values, strict=True):
            worst = max(worst, _relative(y, z) / own.eps)
    return worst


def _relative(y: Tensor, z: Tensor) -> float:
    size = float(z.abs().max()) if z.numel() else 0.0
    return float((y.to(z) - z).abs().max()) / size if size else 0.0
