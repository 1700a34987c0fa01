"""What a probe hands back: a defect, what shows it, and which failed comparisons follow from it."""

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
    """A defect that a probe saw.

    Attributes:
        code: A key of `hodiff.checks.findings.codes.CODES`.
        evidence: What was seen, a phrase each.
        explains: Whether a failed comparison follows from the defect.
        location: Where in the source, as ``"file.py:123"``, or empty.
        needs_symptom: Whether the defect counts only if a comparison failed that it explains.
        severity: Overrides the code's own.
        in_function: Whether the defect is in a plain function, and in no rule.
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
    """The passes that an entry is about, outermost first; what compares a route with itself has none."""
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
    """Whether an entry compares batched with single evaluations."""
    batched = entry.route in _GRADCHECKS and entry.quantity.startswith("batched")
    return entry.route.startswith("vmap") or (batched and says(entry.detail, Wording.BATCHING))


def no_entry(entry: Entry) -> bool:
    """For a defect that shows in no comparison."""
    del entry
    return False


def by_reverse(entry: Entry) -> bool:
    """Whatever runs a backward, to any order."""
    return "reverse" in modes_of(entry)


def by_forward(entry: Entry) -> bool:
    """Whatever runs a jvp, to any order."""
    return "forward" in modes_of(entry)


def every_entry(entry: Entry) -> bool:
    """For a defect after which no comparison is to be trusted."""
    del entry
    return True


def of_derivatives(entry: Entry) -> bool:
    """Whatever is a derivative."""
    return bool(modes_of(entry))


def reverse_differentiated(entry: Entry) -> bool:
    """Whatever differentiates a backward: a pass over a reverse pass, or more than one of either kind beyond that."""
    modes = modes_of(entry)
    return "reverse" in modes[1:] or (len(modes) > 2 and "reverse" in modes)


def forward_differentiated(entry: Entry) -> bool:
    """Whatever differentiates a jvp."""
    modes = modes_of(entry)
    return "forward" in modes[1:] or (len(modes) > 2 and "forward" in modes)


def of_second_order(entry: Entry) -> bool:
    """Whatever differentiates a rule."""
    return len(modes_of(entry)) > 1
