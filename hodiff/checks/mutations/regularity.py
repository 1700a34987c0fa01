"""Tests that a derivative exists at an invented input: no kink, no jump, and agreement of different steps."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from hodiff.checks.attempts import Failure, attempt
from hodiff.checks.comparisons.order_by_order import Level, climb
from hodiff.checks.comparisons.scalar_problem import ScalarProblem
from hodiff.checks.comparisons.scalarize import draw_normal
from hodiff.checks.oracles.finite_differences import extrapolate

_DIRECTIONS = 2
# Relative gap allowed between the sum of two directional derivatives and the derivative along the sum; and the
# fraction of a step that must change the value by less than that part of the whole step's change.
_KINK, _NEAR = 1e-3, 1e-7
# Absolute size below which differences count as rounding.
VANISHING = 1e-9
# Where no derivative exists, differences depend on the largest step. Other steps are a part of it, or short regardless
# of the size of the numbers, as a pole may be near.
_PART, _SHORT = 0.15, 0.01
# The step of second differences, as a part of the largest step, and their allowed relative gap from a quadratic form.
_SECOND, _FORM = 0.01, 0.05
# Number of pairs of directions for that test.
_TURNS = 4
# Relative difference allowed between differences of other steps.
AGREEMENT = 0.1


def narrow(problem: ScalarProblem, generator: torch.Generator) -> ScalarProblem:
    """Restrict a problem of many numbers to a few random directions."""
    sizes = [leaf.numel() for leaf in problem.leaves]
    count = sum(sizes)
    if count <= _DIRECTIONS:
        return problem
    return replace(problem, directions=draw_normal((count, _DIRECTIONS), generator).split(sizes))


def other_reaches(problem: ScalarProblem) -> tuple[float, float]:
    """Return the factors of the largest step with which differences must agree."""
    return _PART, _SHORT / problem.step


def is_differentiable(problem: ScalarProblem) -> bool:
    """Whether there is no jump or kink, and derivatives along two directions add up to that along the sum."""
    everywhere = torch.ones(len(problem.point), dtype=torch.float64)

    def loss(s: float, direction: Tensor = everywhere) -> Tensor:
        value = attempt(problem.curved_loss, s * direction)
        return torch.tensor([math.nan]) if isinstance(value, Failure) else value.detach()[None]

    near, far = (max(abs(float(loss(h) - loss(0.0))) for h in (s, -s)) for s in (_NEAR * problem.step, problem.step))
    if not near <= _KINK * (far + abs(float(loss(0.0)))) + VANISHING:  # the loss raises, or there is a jump
        return False
    along = [
        extrapolate(partial(loss, direction=each), problem.step, problem.eps)
        for each in (*everywhere.diag(), everywhere)
    ]
    *parts, whole = (float(each.value) for each in along)
    apart = abs(sum(parts) - whole)
    return all(each.smooth for each in along) and apart <= _KINK * max(map(abs, (*parts, whole))) + VANISHING


def is_twice_differentiable(problem: ScalarProblem) -> bool:
    """Whether second differences are a quadratic form, unlike those of the smaller of two squares."""
    h = _SECOND * problem.step

    def along(direction: Tensor) -> float:
        ends = [float(problem.curved_loss(s * h * direction).detach()) for s in (1, -1, 0)]
        return (ends[0] + ends[1] - 2 * ends[2]) / h**2

    def is_form(first: Tensor, second: Tensor) -> bool:
        sides = [along(each) for each in (first + second, first - second, first, second)]
        apart = abs(sides[0] + sides[1] - 2 * sides[2] - 2 * sides[3])
        return apart <= _FORM * max(map(abs, sides)) + math.sqrt(VANISHING)

    generator = torch.Generator().manual_seed(0)
    turns = torch.linalg.qr(draw_normal((_TURNS, len(problem.point), len(problem.point)), generator)).Q
    pairs = (each.to(problem.point.device) for each in turns)
    return all(attempt(is_form, pair[:, 0], pair[:, -1]) is True for pair in pairs)


def steps_agree(problem: ScalarProblem, order: int, seed: int) -> bool:
    """Whether differences with other largest steps agree at each order."""

    def levels(reach: float) -> list[Level]:
        generator = torch.Generator().manual_seed(seed)
        at = replace(problem, reach=reach)
        return climb(at, at.curved_loss, order, generator)

    here = levels(1.0)
    for there in map(levels, other_reaches(problem)):
        if len(there) != len(here):
            return False
        for a, b in zip(here, there, strict=True):
            x, y = a.differences.value, b.differences.value
            if not float((x - y).abs().max()) <= AGREEMENT * float(x.abs().max()) + VANISHING:
                return False
    return True
