"""Judgement of an operator at a sample: second-order routes and third-order reverse mode against differences."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from hodiff.checks.attempts import Failure, Outcome, attempt
from hodiff.checks.comparisons.judgement import judge
from hodiff.checks.comparisons.order_by_order import Level, climb, evaluate_route
from hodiff.checks.comparisons.scalar_problem import ScalarProblem
from hodiff.checks.comparisons.scalar_requirements import UnrepeatableError
from hodiff.checks.comparisons.scalarize import draw_normal, scalarize
from hodiff.checks.mutations.regularity import narrow
from hodiff.checks.mutations.sample import Sample
from hodiff.checks.oracles.finite_differences import DifferenceEstimate, extrapolate
from hodiff.checks.report.data import Entry
from hodiff.checks.torch_verdicts import AUDITED_ROUTES, THIRD, Verdict, Verdicts, everywhere
from hodiff.common.randomness import seed_everywhere, seeded
from hodiff.errors import InputError
from hodiff.routes import ROUTES

Function = Callable[..., tuple[Tensor, ...]]

# Statuses of verdicts, by status of an entry.
_WORDS = {"ok": "right", "zero": "wrong", "non-smooth": "not smooth"}
_THREE = "reverse-over-reverse-over-reverse"
_KINK = Verdict("not smooth", None, "differences of the order below do not settle")
_RANDOM = Verdict("random", None, "two evaluations differ")
GRADIENT = "the gradient itself is wrong"
_ROUNDINGS = 300.0
# Size, relative to the lower orders, below which a third derivative may be rounding that intermediate values magnified.
# Then it changes by its own size within a step of this length; a wrong derivative stays.
_NOISE = 1e-8
# Number of evaluations that must agree: a sampler of two values repeats itself half of the time.
_EVALUATIONS = 6
# Tolerance of values against torch's: rounding, which ill-conditioned samples magnify.
_ROUNDING = 1e-8


def audit_sample(sample: Sample, *, correct: bool, seed: int) -> Verdicts:
    """Judge an operator's outputs y at a sample, contracted to sum(u y + w y² / 2) with random u and w."""
    f, point = sample.function(correct=correct), sample.point
    with torch.no_grad(), seeded(seed):
        values, *again = (attempt(f, *point) for _ in range(_EVALUATIONS))
        # Start both from the same random state, so that a sampler gives equal values.
        seed_everywhere(seed)
        uncorrected = attempt(sample.function(correct=False), *point) if correct else values
    if isinstance(values, Failure):
        return everywhere(Verdict("raises", None, values.message))
    reason = obstacle(values)
    if reason:
        return everywhere(Verdict("not differentiable", None, reason))
    if not all(_same(values, each) for each in again):
        return _with_fixed_seed(sample, correct, seed)
    if differs(values, uncorrected):
        return everywhere(Verdict("wrong", None, "the value is not torch's"))
    with seeded(seed):
        try:
            return audit_function(f, point, seed)
        except UnrepeatableError:
            # A sampler that rarely changes its value has changed it now.
            return _with_fixed_seed(sample, correct, seed)


def audit_function(f: Function, point: tuple[Tensor, ...], seed: int = 0) -> Verdicts:
    """Judge the routes at a point, for a deterministic function from float64 tensors to a tuple of tensors."""
    generator = torch.Generator().manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated operators warn
        try:
            problem = narrow(scalarize(f, point, generator), generator)
        except InputError as error:
            return everywhere(Verdict("not differentiable", None, str(error).removeprefix("check: ")))
        first = climb(problem, problem.curved_loss, 1, generator)[0]
        if not first.settled:
            return {route: _unjudged(problem, route, _KINK) for route in AUDITED_ROUTES}
        if first.truth is first.differences:
            wrong = replace(_verdict(entry_of(first, "reverse")), detail=GRADIENT)
            return {route: _unjudged(problem, route, wrong) for route in AUDITED_ROUTES}
        level = climb(problem, problem.curved_loss, 2, generator)[1]
        verdicts = {route: _verdict(entry_of(level, route)) for route in ROUTES}
        verdicts[THIRD] = _third(problem, level, generator)
    return verdicts


def _with_fixed_seed(sample: Sample, correct: bool, seed: int) -> Verdicts:
    """Judge a random operator with a fixed seed: dropout has derivatives then, samplers do not."""
    with torch.random.fork_rng(devices=[]):
        verdicts = audit_function(sample.function(correct=correct, seed=seed), sample.point, seed)
    if any(verdict.detail == GRADIENT for verdict in verdicts.values()):
        return everywhere(_RANDOM)
    return {
        route: replace(each, detail=f"{each.detail} (seed held)".strip())
        if each.is_defect
        else replace(_RANDOM, error=each.error, detail=f"{each.status} with the seed held")
        for route, each in verdicts.items()
    }


def obstacle(values: tuple[Tensor, ...]) -> str:
    """Return why the outputs have no derivative to measure; empty if they have one."""
    if not any(value.numel() for value in values):
        return "no floating-point output"
    if any(torch.finfo(value.dtype).bits < 32 for value in values):
        return "rounds to 16 bits"
    if any(value.layout != torch.strided for value in values):
        return "sparse output"
    return ""


def _same(values: tuple[Tensor, ...], again: tuple[Tensor, ...] | Failure) -> bool:
    return not isinstance(again, Failure) and all(
        a.shape == b.shape and torch.allclose(a, b, rtol=_ROUNDING, atol=_ROUNDING, equal_nan=True)
        for a, b in zip(values, again, strict=True)
    )


def differs(values: tuple[Tensor, ...], own: tuple[Tensor, ...] | Failure, rounding: float | None = None) -> bool:
    """Whether the value differs from torch's by more than rounding."""
    allowed = _ROUNDING if rounding is None else rounding
    return not isinstance(own, Failure) and not all(
        a.shape == b.shape and a.dtype == b.dtype and torch.allclose(a, b, rtol=allowed, atol=allowed, equal_nan=True)
        for a, b in zip(values, own, strict=True)
    )


def entry_of(level: Level, route: str) -> Entry:
    """Compare a route with differences of the order below."""
    return _judge(route, level.order, level.outcomes[route], level.differences, level.lower, level.eps)


def _third(problem: ScalarProblem, level: Level, generator: torch.Generator) -> Verdict:
    """Compare third-order reverse mode with differences of a second derivative that agreed with differences."""
    if not level.settled:
        return _unjudged(problem, THIRD, _KINK)
    first, second = draw_normal((2, len(problem.point)), generator)
    outcome = attempt(evaluate_route, problem.curved_loss, _THREE, problem.point, ((first, second),))
    if isinstance(outcome, Failure):
        return Verdict("raises", None, outcome.message)
    differences = extrapolate(
        lambda s: level.trusted(problem.point + s * first, second).detach()[None], problem.step, problem.eps
    )
    lower = max(level.lower, level.scale)
    entry = _judge(THIRD, 3, outcome, differences, lower, problem.eps)
    if entry.status == "wrong" and float(outcome.abs().max()) < _NOISE * lower:
        beside = attempt(
            evaluate_route,
            problem.curved_loss,
            _THREE,
            problem.point + problem.step * _NOISE * first,
            ((first, second),),
        )
        if not isinstance(beside, Failure) and float((beside - outcome).abs().max()) > float(outcome.abs().max()) / 4:
            return _verdict(replace(entry, status="ok"))
    return _verdict(entry)


def _judge(
    route: str, order: int, outcome: Outcome, differences: DifferenceEstimate, lower: float, eps: float
) -> Entry:
    """Compare; tolerate some hundred roundings of the lower orders if the derivative vanishes."""
    compare = partial(judge, route, order, "", outcome, differences, eps=eps)
    strict, lenient = compare(lower=lower), compare(lower=_ROUNDINGS * lower)
    return lenient if lenient.status == "ok" and strict.status in {"wrong", "zero"} else strict


def _unjudged(problem: ScalarProblem, route: str, otherwise: Verdict) -> Verdict:
    """Return "raises" if the route raises, else the given verdict: there is nothing to compare with."""
    along = torch.ones_like(problem.point)
    third = route == THIRD
    outcome = attempt(
        evaluate_route,
        problem.curved_loss,
        _THREE if third else route,
        problem.point,
        ((along,) * (2 if third else 1),),
    )
    return Verdict("raises", None, outcome.message) if isinstance(outcome, Failure) else otherwise


def _verdict(entry: Entry) -> Verdict:
    status = _WORDS.get(entry.status, entry.status)
    return Verdict(status, entry.error if status in {"right", "wrong"} else None, entry.detail)
