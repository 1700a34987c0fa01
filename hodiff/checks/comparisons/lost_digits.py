"""Diagnosis of cancellation and of numbers out of range, which make comparisons fail though every rule is right.

Cancellation explains errors of the size by which rounding inside changes the derivatives. Random rounding measures that
change: each result of an operator is moved randomly by one unit in its last place.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from hodiff.checks.attempts import Failure, attempt
from hodiff.checks.comparisons.order_by_order import (
    Level,
    Loss,
    against_differences,
    between_routes,
    climb,
    evaluate_route,
)
from hodiff.checks.comparisons.scalar_problem import ScalarProblem
from hodiff.checks.probes.cause import Cause, modes_of
from hodiff.checks.probes.numbers_inside import numbers_inside
from hodiff.checks.report.data import Entry
from hodiff.common.trees import has_strides
from hodiff.torch_internals.interception import DispatchMode, run_operator
from hodiff.torch_internals.operators import schema_of
from hodiff.torch_internals.tensors import is_zero_without_memory

# Number of runs with random rounding.
_TIMES = 3
# Allowed error of a derivative, in units of its change by rounding.
_SAFETY = 100.0
# Ratio of a sum's parts to the sum that counts as cancellation.
_CANCEL = 1e3
# Relative noise of values above which differences of steps of 1e-6 miss gradcheck's tolerance, and above which
# differences may not settle.
_ROUGH, _UNSETTLED = 1e-12, 1e-9
# Relative error from which lost digits are an error instead of a warning.
_GROSS = 1e-3
_FAILED = {"wrong", "zero", "non-smooth"}
# Statuses of comparisons that numbers out of range may cause.
_OUT_OF_RANGE = _FAILED | {"non-finite", "fails"}
_BY_DIFFERENCES = {"vs differences", "vs SciPy", "curved loss"}
# Divisors of the inputs, tried until all numbers are in range.
_SMALLER = (4.0, 16.0, 64.0, 256.0, 1024.0)


def lost_digits(
    problem: ScalarProblem, levels: Sequence[Level], entries: Sequence[Entry], codes: Collection[str]
) -> list[Cause]:
    """Return the cause that digits cancel, if it explains all failed comparisons."""
    failed = [entry for entry in entries if entry.failed and modes_of(entry)]
    checks = [entry for entry in failed if entry.detail.startswith("GradcheckError")]
    if not failed or not all(entry in checks or entry.status in _FAILED for entry in failed):
        return []
    run = attempt(lambda: numbers_inside(lambda: problem.function(*(leaf.clone() for leaf in problem.leaves))))
    if isinstance(run, Failure) or run.narrow or run.cancelled < _CANCEL:
        return []
    rough = _noise_of_values(problem)
    noise = {level.order: _noise(problem, level) for level in levels}
    smooth = max(noise, default=0)

    def explained(entry: Entry) -> bool:
        if entry in checks:
            return rough > _ROUGH
        # Noise of the order below, whose differences may settle on a wrong value.
        below = rough if entry.order <= 1 else noise.get(min(entry.order - 1, smooth), 0.0)
        if entry.status == "non-smooth" or (entry.quantity in _BY_DIFFERENCES and below > _UNSETTLED):
            return max(rough, below) > _UNSETTLED
        return entry.error is not None and entry.error <= _SAFETY * noise.get(min(entry.order, smooth), 0.0)

    if not all(map(explained, failed)):
        return []
    worst = max((entry.error for entry in failed if entry.error is not None), default=0.0)
    part = max(noise.values(), default=0.0)
    evidence = (
        f"parts of a sum are {run.cancelled:.0e} times as large as the sum; derivatives move by {part:.0e} of their "
    )
    evidence += "size where operators round otherwise"
    severity = "warning" if worst <= _GROSS and all(entry.status != "non-smooth" for entry in failed) else "error"
    code = "HD111" if severity == "warning" and "HD111" in codes else "HD118"
    known = set(map(id, failed))
    return [Cause(code, (evidence,), lambda entry: id(entry) in known, severity=severity)]


class _Shaken(DispatchMode):
    """Mode that rounds each new result of an operator randomly."""

    def __init__(self, seed: int):
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = run_operator(func, args, kwargs)
        if any(each.alias_info is not None for each in schema_of(func).returns):  # a view, or an argument
            return result
        return tree_map_only(Tensor, self._rounded, result)

    def _rounded(self, x: Tensor) -> Tensor:
        if not x.is_floating_point() or not has_strides(x) or x.is_meta or is_zero_without_memory(x):
            return x
        unit = torch.finfo(x.dtype).eps
        up = (
            torch
            .randint(-1, 2, (x.numel(),), generator=self._generator, device=self._generator.device)
            .view(x.shape)
            .to(x)
        )
        return x * (1 + unit * up)


def _noise_of_values(problem: ScalarProblem) -> float:
    """Return the change of the outputs by random rounding, relative to the largest output."""
    outcomes = [attempt(_values, problem, seed) for seed in range(1 + _TIMES)]
    return _spread(outcomes)


def _values(problem: ScalarProblem, seed: int) -> Tensor:
    with torch.no_grad(), _Shaken(seed) if seed else nullcontext():
        return problem.joined_outputs(problem.point)


def _noise(problem: ScalarProblem, level: Level) -> float:
    """Return the largest relative change of a level's derivatives by random rounding."""
    return max(
        moved_by_rounding(loss, route, problem.point, level, level.scale)
        for route in level.outcomes
        for loss in (problem.loss, problem.curved_loss)
    )


def moved_by_rounding(loss: Loss, route: str, point: Tensor, level: Level, scale: float = math.inf) -> float:
    """Return the relative change of a derivative by random rounding; relative to `scale` if smaller."""

    def outcome(seed: int) -> Tensor | Failure:
        with _Shaken(seed) if seed else nullcontext():
            found: Tensor | Failure = attempt(evaluate_route, loss, route, point, level.tuples, level.free)
        return found

    return _spread([outcome(seed) for seed in range(1 + _TIMES)], scale)


def _spread(outcomes: list[Tensor | Failure], scale: float = math.inf) -> float:
    found = [each for each in outcomes if isinstance(each, Tensor) and bool(each.isfinite().all())]
    if len(found) < len(outcomes):
        return 0.0
    gap = max(float((each - found[0]).abs().max()) for each in found)
    # The scale, from differences, also suffers from rounding: use it only if it is smaller.
    return gap / max(min(scale, *(float(each.abs().max()) for each in found)), 1e-300)


def out_of_range(problem: ScalarProblem, levels: Sequence[Level], entries: Sequence[Entry]) -> list[Cause]:
    """Return the cause that numbers overflow or vanish inside, if every route is right at smaller inputs."""
    failed = [entry for entry in entries if entry.failed]
    known = set(map(id, failed))
    if not failed or any(entry.status not in _OUT_OF_RANGE for entry in failed) or not _leaves_range(problem, levels):
        return []
    for part in _SMALLER:
        smaller = replace(problem, leaves=tuple(leaf / part for leaf in problem.leaves))
        generator = torch.Generator().manual_seed(0)
        climbed = partial(climb, smaller, smaller.loss, len(levels), generator, by_differences=False)
        found = attempt(climbed)
        if isinstance(found, Failure) or _leaves_range(smaller, found):
            continue
        if any(entry.failed for entry in (*against_differences(found, len(levels)), *between_routes(found))):
            return []
        evidence = f"numbers inside overflow or vanish; at inputs {part:g} times as small every route is right"
        return [Cause("HD111", (evidence,), lambda entry: id(entry) in known, severity="error", in_function=True)]
    return []


def _leaves_range(problem: ScalarProblem, levels: Collection[Level]) -> bool:
    """Whether numbers in the computation of values or derivatives overflow or underflow."""

    def everything() -> None:
        problem.joined_outputs(problem.point)
        for level in levels:
            for route in level.outcomes:
                evaluate_route(problem.loss, route, problem.point, level.tuples, level.free)

    seen = attempt(lambda: numbers_inside(everything))
    return not isinstance(seen, Failure) and seen.left_range
