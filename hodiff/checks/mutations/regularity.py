"""Whether there is a derivative at an invented input: no kink, no jump, and two steps that agree."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from hodiff.checks.attempts import Failure, attempt
from hodiff.checks.comparisons.orders import Level, climb
from hodiff.checks.comparisons.scalar_problem import ScalarProblem
from hodiff.checks.comparisons.scalarize import draw_normal
from hodiff.checks.oracles.finite_differences import extrapolate

_DIRECTIONS = 2
# Part of a derivative by which those along two directions may miss their sum's, and of what a whole step changes by
# which this small part of it may.
_KINK, _NEAR = 1e-3, 1e-7
# What is as small counts as rounding, whatever its relative error.
VANISHING = 1e-9
# At a point where a derivative does not exist, differences depend on the largest step: others are a part of it, or
# short whatever the numbers are, among which a pole may be near.
_PART, _SHORT = 0.15, 0.01
# The step of second differences, as a part of the largest, and the part by which they may miss those of a form.
_SECOND, _FORM = 0.01, 0.05
# Pairs of directions along which that is asked.
_TURNS = 4
# Part of a derivative by which differences of other steps may differ.
AGREEMENT = 0.1


def narrow(problem: ScalarProblem, generator: torch.Generator) -> ScalarProblem:
    """The problem along a few random directions where it has more numbers."""
    sizes = [leaf.numel() for leaf in problem.leaves]
    count = sum(sizes)
    if count <= _DIRECTIONS:
        return problem
    return replace(problem, directions=draw_normal((count, _DIRECTIONS), generator).split(sizes))


def other_reaches(problem: ScalarProblem) -> tuple[float, float]:
    """Of steps with which differences have to say the same."""
    return _PART, _SHORT / problem.step


def is_differentiable(problem: ScalarProblem) -> bool:
    """Whether no step is seen, and differences along two directions add up to those along their sum."""
    everywhere = torch.ones(len(problem.point), dtype=torch.float64)

    def loss(s: float, direction: Tensor = everywhere) -> Tensor:
        value = attempt(problem.curved_loss, s * direction)
        return torch.tensor([math.nan]) if isinstance(value, Failure) else value.detach()[None]

    near, far = (max(abs(float(loss(h) - loss(0.0))) for h in (s, -s)) for s in (_NEAR * problem.step, problem.step))
    if not near <= _KINK * (far + abs(float(loss(0.0)))) + VANISHING:  # it raises, or there is a jump
        return False
    along = [
        extrapolate(partial(loss, direction=each), problem.step, problem.eps)
        for each in (*everywhere.diag(), everywhere)
    ]
    *parts, whole = (float(each.value) for each in along)
    apart = abs(sum(parts) - whole)
    return all(each.smooth for each in along) and apart <= _KINK * max(map(abs, (*parts, whole))) + VANISHING


def is_twice_differentiable(problem: ScalarProblem) -> bool:
    """Whether second differences are those of a quadratic form, as they are not of the smallest of two squares."""
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
    """Whether differences of other steps say the same at each order."""

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
