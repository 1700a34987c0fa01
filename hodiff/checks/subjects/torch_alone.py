"""Warning about derivatives that torch alone gets wrong and hodiff's corrections get right."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from torch import Tensor

from hodiff.checks.attempts import attempt
from hodiff.checks.comparisons.lost_digits import moved_by_rounding
from hodiff.checks.comparisons.order_by_order import Level, evaluate_route
from hodiff.checks.findings.codes import CODES
from hodiff.checks.findings.measured import finding_of, in_words, numbers, routes_of
from hodiff.checks.report.data import Entry
from hodiff.checks.report.report import Finding
from hodiff.checks.subjects.subject import Comparison
from hodiff.checks.subjects.torch_functions import Culprit, culprits
from hodiff.corrections import Corrections
from hodiff.corrections.registry import CORRECTIONS, correction_of

# Relative error of torch that is tolerated, and the size below which a derivative counts as zero.
_LOST, _NORMAL = 1e-3, 1e-290


class _Asking(Corrections):
    """Corrections that also record whether a call's correction does more than save time."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        correction = correction_of(func, args)
        if correction is not None and (
            correction.kind != "slow" or (correction.mends is not None and correction.mends(*args, **kwargs or {}))
        ):
            self.asked = True
        return super().__torch_function__(func, types, args, kwargs)


def torch_alone(
    prepare: Callable[[], Callable[[], Any]],
    comparison: Comparison,
    order: int,
    seed: int,
    functions: Sequence[type] = (),
) -> tuple[Finding, ...]:
    """Return a warning if torch alone fails at a call where corrections do not."""
    with _Asking() as mode:
        attempt(prepare())
    if not (mode.asked or functions):
        return ()
    failed = tuple(_failed(comparison))
    if not failed:
        return ()
    guilty = list(culprits(prepare, nullcontext, order, seed, lambda function: function in CORRECTIONS))
    return (_finding(failed, guilty, functions),)


def _failed(comparison: Comparison) -> Iterator[Entry]:
    """Yield the routes that fail only without corrections."""
    point = comparison.problem.point
    for level in comparison.levels:
        for route, corrected in level.outcomes.items():
            if not level.settled or level.compare(route, "", corrected, level.truth).failed:
                continue
            outcome = attempt(evaluate_route, comparison.loss, route, point, level.tuples, level.free)
            entry = level.compare(route, "by torch alone", outcome, level.truth)
            if entry.failed:
                yield entry
            elif (part := _lost_part(corrected, outcome)) > _LOST and _is_sure(comparison, route, level):
                yield replace(entry, status="wrong", error=part)


def _lost_part(corrected: Any, outcome: Any) -> float:
    """Return torch's relative error from corrected derivatives, for tails in which differences show nothing."""
    if not (isinstance(corrected, Tensor) and isinstance(outcome, Tensor)):
        return 0.0
    size = float(corrected.abs().max()) if corrected.numel() else 0.0
    return float((outcome - corrected).abs().max()) / size if size > _NORMAL else 0.0


def _is_sure(comparison: Comparison, route: str, level: Level) -> bool:
    """Whether the corrected derivative is more than rounding."""
    with Corrections():
        return moved_by_rounding(comparison.loss, route, comparison.problem.point, level) < _LOST


def _finding(failed: tuple[Entry, ...], guilty: list[Culprit], functions: Sequence[type]) -> Finding:
    inside = tuple(f"torch function {each.name}: {', '.join(numbers(each.failed))}" for each in guilty) or tuple(
        f"custom Function {each.__name__}" for each in functions
    )
    known = CODES["HD410"].cause.removesuffix(".")
    cause = f"{known}: by torch alone it {in_words(failed)} by {routes_of(failed)}."
    location = next((each.location for each in guilty if each.location), "")
    return finding_of("HD410", failed, cause, inside or numbers(failed), location)
