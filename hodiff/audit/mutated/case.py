"""Judgement of an invented call: its value, and derivatives of order 1 to 3 by every route, against differences."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hodiff.audit.audit_sample import differs, entry_of, obstacle
from hodiff.checks.attempts import Failure, attempt
from hodiff.checks.comparisons.order_by_order import Level, climb, in_own_dtype
from hodiff.checks.comparisons.scalar_problem import ScalarProblem
from hodiff.checks.comparisons.scalar_requirements import UnrepeatableError
from hodiff.checks.comparisons.scalarize import scalarize
from hodiff.checks.mutations.regularity import AGREEMENT, VANISHING, is_differentiable, narrow, other_reaches
from hodiff.checks.mutations.sample import Sample
from hodiff.checks.report.data import Entry
from hodiff.common.randomness import seeded
from hodiff.errors import InputError

# Statuses of errors without an exception.
SILENT = frozenset({"wrong", "zero", "non-finite"})
_ORDER = 3
# Tolerance of float32 against float64: ill-conditioned calls magnify rounding to some hundredths.
_GROSS = 0.1
# Tolerance of values in float32, whose rounding ill-conditioned calls magnify.
_COARSE = 1e-3


@dataclass(frozen=True)
class Defect:
    """Value or derivative that is wrong, missing or not finite.

    Attributes:
        order: Order of the derivative; 0 for the value.
        route: Route of the derivative.
        status: "wrong", "zero", "non-finite" or "raises".
        error: Error relative to the scale of the derivative; None without a comparison.
        detail: Further remark.
    """

    order: int
    route: str
    status: str
    error: float | None = None
    detail: str = ""

    @property
    def is_silent(self) -> bool:
        """Whether no exception reports the defect."""
        return self.status in SILENT


def judge_case(sample: Sample, *, correct: bool, seed: int) -> list[Defect] | None:
    """Return the defects of an invented call; None if torch refuses it, or if differences do not settle."""
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        f, own, redrawn = (
            sample.function(correct=each, seed=one) for each, one in ((correct, seed), (False, seed), (False, seed + 1))
        )
        with torch.no_grad():
            value, torchs, others = (attempt(each, *sample.point) for each in (f, own, redrawn))
        if isinstance(torchs, Failure) or obstacle(torchs):
            return None
        if isinstance(value, Failure):
            return [Defect(0, "value", "raises", None, value.message)]
        single = any(leaf.dtype == torch.float32 for leaf in sample.point)
        draws = differs(others, torchs)
        if single and draws:
            return None  # other precisions draw other numbers
        if not draws and differs(value, torchs, _COARSE if single else None):
            return [Defect(0, "value", "wrong", None, "the value is not torch's")]
        with seeded(seed):
            try:
                found = _judge_derivatives(sample, correct, seed, single)
            except (UnrepeatableError, InputError):
                return None  # random despite the seed, or nothing to differentiate
        # By torch's definition, samples of a distribution are constants.
        return None if draws and any((each.order, each.status) == (1, "zero") for each in found or ()) else found


def _judge_derivatives(sample: Sample, correct: bool, seed: int, single: bool) -> list[Defect] | None:
    double = in_double(sample) if single else sample
    problem, levels = _climbed(double, correct, seed, 2 if single else _ORDER)
    if not levels[0].settled or not problem.curved_loss(problem.point).isfinite():
        return None
    entries = _in_single(sample, problem, levels, correct, seed) if single else _in_double(levels)
    amiss = [each for each in entries if each.status in SILENT or each.status == "raises"]
    if any(each.status in SILENT for each in amiss):
        if not is_differentiable(_climbed(_with_all_numbers(double), correct, seed, 0)[0]):
            return None
        for reach in other_reaches(problem):
            _, again = _climbed(double, correct, seed, len(levels), reach)
            amiss = [each for each in amiss if each.status == "raises" or _is_sure(each, levels, again, single)]
    return [Defect(each.order, each.route, each.status, each.error, each.detail) for each in amiss]


def _with_all_numbers(sample: Sample) -> Sample:
    """Return the call with expanded tensors copied to full memory, as a function of all their elements."""
    leaves, layouts = list(sample.leaves), dict(sample.layouts)
    for place, layout in sample.layouts.items():
        whole = layout.arrange(leaves[place].detach())
        if whole.shape != leaves[place].shape:
            leaves[place] = whole.clone(memory_format=torch.contiguous_format)
            del layouts[place]
    return replace(sample, leaves=tuple(leaves), layouts=layouts)


def _climbed(
    sample: Sample, correct: bool, seed: int, order: int, reach: float = 1.0
) -> tuple[ScalarProblem, list[Level]]:
    generator = torch.Generator().manual_seed(seed)
    whole = scalarize(sample.function(correct=correct, seed=seed), sample.point, generator)
    problem = replace(narrow(whole, generator), reach=reach)
    return problem, climb(problem, problem.curved_loss, order, generator, by_differences=False)


def _is_sure(entry: Entry, levels: list[Level], again: list[Level], single: bool) -> bool:
    """Whether differences of other steps agree, and the error is more than rounding of a vanishing derivative."""
    if len(again) < entry.order:
        return False
    here, there = levels[entry.order - 1].differences, again[entry.order - 1].differences
    apart = float((here.value - there.value).abs().max())
    outcome = levels[entry.order - 1].outcomes[entry.route]
    if entry.status == "non-finite" or single or isinstance(outcome, Failure):
        return apart <= AGREEMENT * float(here.value.abs().max()) + VANISHING
    error = float((outcome - here.value).abs().max())
    return error > VANISHING and apart <= AGREEMENT * error


def in_double(sample: Sample) -> Sample:
    """Return the call with float64 instead of float32."""
    return replace(
        sample,
        leaves=tuple(
            leaf.double() if isinstance(leaf, Tensor) and leaf.dtype == torch.float32 else leaf
            for leaf in sample.leaves
        ),
    )


def _in_double(levels: list[Level]) -> list[Entry]:
    return [entry_of(level, route) for level in levels if level.settled for route in level.outcomes]


def _in_single(sample: Sample, problem: ScalarProblem, levels: list[Level], correct: bool, seed: int) -> list[Entry]:
    """Compare the float32 call with the float64 call; only gross errors count."""
    run = sample.function(correct=correct, seed=seed)
    # scalarize also keeps infinite elements constant here.
    own = scalarize(run, sample.point, torch.Generator().manual_seed(seed))
    drawn = {name: getattr(problem, name) for name in ("directions", "cotangents", "weights", "reach")}
    coarse = replace(own, **drawn, eps=torch.finfo(torch.float32).eps)
    settled = [level for level in levels if level.settled]
    return [
        replace(each, status="wrong") if each.status == "imprecise" and (each.error or 0.0) > _GROSS else each
        for each in in_own_dtype(coarse, coarse.curved_loss, settled, "in float32")
    ]
