"""Comparison of Hessians by every route with SciPy's, which uses values only."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from hodiff.checks.attempts import Failure, attempt
from hodiff.checks.comparisons.judgement import is_settled, judge
from hodiff.checks.comparisons.order_by_order import Level, Loss
from hodiff.checks.comparisons.scalar_problem import ScalarProblem
from hodiff.checks.oracles.finite_differences import DifferenceEstimate
from hodiff.checks.oracles.scipy_hessian import scipy_hessian
from hodiff.checks.report.data import Entry

# SciPy's first step, in largest steps of differences.
_FIRST = 5.0
# Part of the largest step below which differences indicate a nearby pole or waves.
_BESIDE = 4.0**-6


def against_scipy(problem: ScalarProblem, loss: Loss, levels: list[Level]) -> Iterator[Entry]:
    """Compare each route's Hessian with SciPy's, along the same directions."""
    for level in levels[1:2]:
        if level.raises:
            for route, outcome in level.outcomes.items():
                yield level.compare(route, "vs SciPy", outcome, level.truth)
            return
        W = level.free.T
        # If differences needed small steps, as near a pole, SciPy must begin with small steps, too.
        found = level.differences.step
        step = problem.step if found > _BESIDE * problem.step else found / _FIRST
        estimate = attempt(_scipy_estimate, step, loss, W, level.scale)
        entries = list(_judge_all(level, W, estimate))
        if isinstance(estimate, DifferenceEstimate) and any(entry.status == "wrong" for entry in entries):
            entries = list(_judge_all(level, W, attempt(_confirmed, estimate, loss, W, level.scale)))
        yield from entries


def _judge_all(level: Level, W: Tensor, estimate: DifferenceEstimate | Failure) -> Iterator[Entry]:
    doubt = _doubt(level, estimate)
    for route, outcome in level.outcomes.items():
        if doubt or isinstance(estimate, Failure):
            yield Entry(route, 2, "vs SciPy", None, None, "skipped", doubt)
            continue
        product = outcome @ W if isinstance(outcome, Tensor) and "reverse" in route else outcome
        yield judge(route, 2, "vs SciPy", product, estimate, lower=level.lower, eps=level.eps)


def _scipy_estimate(largest: float, loss: Loss, W: Tensor, scale: float) -> DifferenceEstimate:
    """Return SciPy's Hessian of s -> loss(W s), with smaller first steps if the tolerance is missed."""
    found = []
    for step in (_FIRST * largest, 0.1 * _FIRST * largest, 0.01 * _FIRST * largest):
        found.append(_estimate_from(step, loss, W, scale))
        if found[-1].error <= 1e-6 * scale:
            break
    return min(found, key=lambda estimate: estimate.error)


def _estimate_from(step: float, loss: Loss, W: Tensor, scale: float) -> DifferenceEstimate:
    origin = torch.zeros(W.shape[1], dtype=torch.float64, device=W.device)

    def value(s: Tensor) -> Tensor | float:
        outcome = attempt(loss, W @ s)
        return math.nan if isinstance(outcome, Failure) else outcome

    tolerances = {"atol": 1e-9 * scale}
    estimate = scipy_hessian(value, origin, initial_step=step, order=4, maxiter=8, tolerances=tolerances)
    error = float(estimate.error.max()) if bool(estimate.matrix.isfinite().all()) else math.inf
    return DifferenceEstimate(estimate.matrix.to(W), error, step, smooth=True)


def _confirmed(estimate: DifferenceEstimate, loss: Loss, W: Tensor, scale: float) -> DifferenceEstimate:
    """Return the estimate with an error that covers its distance to those from two other first steps."""
    # SciPy's error is the change at the last refinement, which rounding makes tiny once in a while.
    others = [_estimate_from(part * estimate.step, loss, W, scale) for part in (0.8, 0.6)]
    distances = [float((other.value - estimate.value).abs().max()) for other in others if math.isfinite(other.error)]
    return replace(estimate, error=max(estimate.error, *distances, 0.0))


def _doubt(level: Level, estimate: DifferenceEstimate | Failure) -> str:
    """Return why SciPy's estimate cannot judge, empty if it can; at a kink it may settle on a wrong value."""
    if isinstance(estimate, Failure):
        return estimate.message
    if not level.settled:
        return "the point is not smooth"
    return "" if is_settled(estimate, level.lower, level.eps) else "SciPy's differences do not settle"
