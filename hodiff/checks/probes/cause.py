"""Result of a probe: a defect, its evidence, and the failed comparisons that follow from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hodiff.checks.report.data import Entry
from hodiff.torch_internals.wording import Wording, says

Explains = Callable[[Entry], bool]

UNRELIABLE = frozenset({"HD303", "HD305", "HD308", "HD309", "HD903"})
"""Defects after which numbers mean nothing: another call may give others, so none is compared again."""


@dataclass(frozen=True)
class Cause:
    """Defect that a probe found.

    Attributes:
        code: A key of `hodiff.checks.findings.codes.CODES`.
        evidence: The observations, one phrase per observation.
        explains: Whether a failed comparison follows from the defect.
        location: Line of the source, such as ``"file.py:123"``, or empty.
        needs_symptom: Whether the defect counts only if it explains a failed comparison.
        severity: Severity that overrides the code's own.
        in_function: Whether the defect is in a plain function instead of a rule.
    """

    code: str
    evidence: tuple[str, ...]
    explains: Explains
    location: str = ""
    needs_symptom: bool = False
    severity: str = ""
    in_function: bool = False


_GRADCHECKS = {"gradcheck": 0, "gradgradcheck": 1}


def modes_of(entry: Entry) -> list[str]:
    """Return the passes of an entry, outermost first; none if it compares a route with itself."""
    if about_batches(entry):
        return []
    route = entry.route
    if route in _GRADCHECKS:
        # gradgradcheck names a batched second order by its outermost pass only.
        route = entry.quantity.removeprefix("batched ")
        if entry.route == "gradgradcheck" and "-over-" not in route:
            route = f"{route}-over-reverse"
    elif route == "compile":
        route = entry.quantity
    return [mode for mode in route.split("-over-") if mode in {"reverse", "forward"}]


def about_batches(entry: Entry) -> bool:
    """Whether the entry compares batched with single evaluations."""
    batched = entry.route in _GRADCHECKS and entry.quantity.startswith("batched")
    return entry.route.startswith("vmap") or (batched and says(entry.detail, Wording.BATCHING))


def no_entry(entry: Entry) -> bool:
    """Return False: the defect shows in no comparison."""
    del entry
    return False


def by_reverse(entry: Entry) -> bool:
    """Whether the entry runs a backward, at any order."""
    return "reverse" in modes_of(entry)


def by_forward(entry: Entry) -> bool:
    """Whether the entry runs a jvp, at any order."""
    return "forward" in modes_of(entry)


def every_entry(entry: Entry) -> bool:
    """Return True: the defect makes all comparisons unreliable."""
    del entry
    return True


def of_derivatives(entry: Entry) -> bool:
    """Whether the entry compares a derivative."""
    return bool(modes_of(entry))


def reverse_differentiated(entry: Entry) -> bool:
    """Whether the entry differentiates a backward: a pass over reverse, or two more passes."""
    modes = modes_of(entry)
    return "reverse" in modes[1:] or (len(modes) > 2 and "reverse" in modes)


def forward_differentiated(entry: Entry) -> bool:
    """Whether the entry differentiates a jvp: a pass over forward, or two more passes."""
    modes = modes_of(entry)
    return "forward" in modes[1:] or (len(modes) > 2 and "forward" in modes)


def of_second_order(entry: Entry) -> bool:
    """Whether the entry differentiates a rule."""
    return len(modes_of(entry)) > 1
