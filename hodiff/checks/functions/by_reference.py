"""Check of a low-precision function against a float64 reference, without comparisons that need float64 inside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hodiff.checks.comparisons.low_precision import against_reference, noise_note, reference_problem, with_truth
from hodiff.checks.comparisons.orders import climb
from hodiff.checks.comparisons.scalar_problem import ScalarProblem
from hodiff.checks.comparisons.vmapped import vmap_checks
from hodiff.checks.functions.conclusion import calls_within, conclude
from hodiff.checks.functions.switches import Switches
from hodiff.checks.probes.probe import probe
from hodiff.checks.report.report import Report

# A function with a reference need not compute in float64.
_OF_DOUBLE = {"HD306"}


def check_by_reference(
    f: Any,
    args: tuple[Any, ...],
    own: ScalarProblem,
    switches: Switches,
    *,
    reference: Callable[..., Any],
    ulps: float | None,
    generator: torch.Generator,
) -> Report:
    """Check a function in its own dtype against the reference in float64."""
    truth = reference_problem(own, reference, args, generator)
    levels = climb(truth, truth.loss, switches.order, generator)
    entries = against_reference(own, truth, levels, switches.order, ulps, generator)
    size = max([1e-300, *(float(y.abs().max()) for y in own.function(*own.leaves) if y.numel())])
    if switches.vmap:
        entries += vmap_checks(own, switches.order, size, generator)
    calls = with_truth(calls_within(own, f), f, reference)
    causes = probe(
        *(f, args, own.function, own.leaves, calls),
        approximate=False,
        seed=switches.seed,
        vmap=switches.vmap,
        brief=switches.brief,
        truth=truth.function,
    )
    causes = [cause for cause in causes if cause.code not in _OF_DOUBLE]
    return conclude(f, own, entries, causes, calls, levels, noise_note(own, truth), correct=switches.correct)
