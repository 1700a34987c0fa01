"""Diagnosis: turns failed comparisons and the causes that probes found into findings with codes and evidence.

A cause explains the failed comparisons that follow from it. A message of torch about a missing rule explains the
comparison that raised it. A table assigns codes to the remaining comparisons.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hodiff.checks.findings.codes import CODES
from hodiff.checks.findings.make_finding import make_finding, routes_of, sorted_findings, worst_severity
from hodiff.checks.probes.cause import UNRELIABLE, Cause, about_batches, modes_of
from hodiff.checks.report.data import Entry
from hodiff.checks.report.report import Finding
from hodiff.torch_internals.wording import Wording, pattern_of


@dataclass(frozen=True)
class CodePattern:
    """Code of a defect, and patterns of the entries with that code.

    All patterns but `detail` are matched at the start.
    """

    code: str
    kind: str = ""
    route: str = ""
    order: str = ""
    quantity: str = ""
    detail: str = ""
    fact: str = ""

    def matches(self, entry: Entry, facts: frozenset[str]) -> bool:
        """Whether all patterns match the entry, and the required fact, if any, holds."""
        return (
            (not self.fact or self.fact in facts)
            and re.match(self.kind, entry.status) is not None
            and re.match(self.route, entry.route) is not None
            and re.match(self.order, str(entry.order)) is not None
            and re.match(self.quantity, entry.quantity) is not None
            and re.search(self.detail, entry.detail) is not None
        )


# Codes of torch's messages about missing rules; specific patterns come first.
MESSAGES: tuple[CodePattern, ...] = (
    CodePattern("HD107", detail=pattern_of(Wording.ONCE_DIFFERENTIABLE)),
    CodePattern("HD412", detail=pattern_of(Wording.NO_SETUP_CONTEXT, Wording.NO_JVP), fact="operator"),
    CodePattern("HD405", detail=pattern_of(Wording.NO_SETUP_CONTEXT), fact="custom"),
    CodePattern("HD406", detail=pattern_of(Wording.NO_SETUP_CONTEXT), fact="plain"),
    CodePattern("HD106", detail=pattern_of(Wording.NO_NUMBERS)),
    CodePattern("HD403", detail=pattern_of(Wording.NO_VMAP, Wording.TWO_VMAPS)),
    CodePattern("HD411", detail=pattern_of(Wording.NO_GRAPH), fact="plain"),
    CodePattern(
        "HD406",
        detail=pattern_of(Wording.NO_FORWARD_RULE, Wording.NO_REVERSE_RULE, Wording.NO_AUTOGRAD_FORMULA),
    ),
    CodePattern("HD401", detail=pattern_of(Wording.NO_JVP)),
    CodePattern("HD406", detail=pattern_of(Wording.FORWARD_MODE)),
)

# Codes whose cause says as much as torch's message.
_WITHOUT_MESSAGE = {"HD401", "HD405", "HD412"}
# Defects that are reported as another defect, whose remedy covers them.
_REPORTED_AS = {"HD401": "HD405"}

# Codes of entries without another explanation; the first match decides.
OTHER_FAILURES: tuple[CodePattern, ...] = (
    CodePattern("HD306", kind="float64"),
    CodePattern("HD113", kind="imprecise"),
    CodePattern("HD901", kind="non-smooth"),
    CodePattern("HD112", kind="non-finite"),
    CodePattern("HD404", route="compile"),
    CodePattern("HD402", route="vmap", detail="^vmap gives shape"),
    CodePattern("HD402", route="vmap of values", kind="raises", fact="batching"),
    CodePattern("HD407", route="vmap", kind="raises"),
    CodePattern("HD402", route="vmap"),
    CodePattern("HD407", quantity="batched", detail=pattern_of(Wording.BATCHING)),
    CodePattern("HD104", kind="raises|fails", detail="slope for a constant"),
    CodePattern("HD408", kind="raises"),
    CodePattern("HD408", kind="fails", detail="^(?!GradcheckError)"),
    CodePattern("HD406", fact="plain"),
    CodePattern("HD101", route="reverse$|gradcheck", order="1", quantity="(?!forward)"),
    CodePattern("HD102", route="forward$|gradcheck", order="1"),
    CodePattern("HD115"),
)

# Defects after which batched and single evaluations differ, or a batched one raises.
_UNEQUAL_BATCHES = {"HD301", "HD302", *UNRELIABLE}
# Defects for which differences do not settle.
_NOISY = {"HD111", "HD118", *UNRELIABLE}
_RAISE_IN_BATCHES = {"HD104", "HD106", "HD107", "HD116", "HD201", "HD202", "HD203", "HD204", "HD304"}
# Defects in which backward computes outside of the graph, and the relative error that solvers there may have.
_CUTS = {"HD104", "HD106"}
_SOLVER_ERROR = 1e-3


def diagnose(
    entries: Iterable[Entry],
    causes: Sequence[Cause] = (),
    *,
    facts: frozenset[str] = frozenset({"custom"}),
    settled: frozenset[int] = frozenset(),
    location: str = "",
) -> tuple[Finding, ...]:
    """Return findings that name each defect once.

    Args:
        entries: All comparisons.
        causes: The causes that probes found.
        facts: ``"custom"`` if there are custom Functions, ``"operator"`` if there are operators of torch.library, else
            ``"plain"``; ``"batching"`` if a custom Function has a vmap.
        settled: The orders at which differences know the derivative, so that a derivative that is not finite is wrong.
        location: Location of the function, for defects without their own location.

    Returns:
        The findings, errors first; empty if no comparison failed and there are no causes.
    """
    failed = [entry for entry in entries if entry.failed]
    messages = {id(entry): _code(MESSAGES, entry, facts) for entry in failed}
    edges = _non_smooth_cause(failed, causes, settled)
    # Where the function itself is not smooth, no comparison is a symptom of anything else.
    smooth = [entry for entry in failed if not any(edge.explains(entry) for edge in edges)]
    causes = [*causes, *edges, *_inner_gradient_cause(messages)]
    causes = [cause for cause in causes if not cause.needs_symptom or _has_symptom(cause, smooth, messages)]
    causes += _nesting_cause(failed, causes, messages)
    codes = {
        id(entry): _code_of_cause(entry, causes, messages[id(entry)]) or _code(OTHER_FAILURES, entry, facts)
        for entry in failed
    }
    present = set(codes.values())
    codes = {key: _REPORTED_AS[code] if _REPORTED_AS.get(code) in present else code for key, code in codes.items()}
    present = set(codes.values())
    entries_of: dict[str, list[Entry]] = {cause.code: [] for cause in causes}
    for entry in failed:
        code = codes[id(entry)]
        entries_of.setdefault(_first_order_code(entry, present) if code == "HD115" else code, []).append(entry)
    return sorted_findings(
        _finding(code, own, [cause for cause in causes if cause.code == code], location)
        for code, own in entries_of.items()
    )


def _code(rules: Sequence[CodePattern], entry: Entry, facts: frozenset[str]) -> str:
    return next((rule.code for rule in rules if rule.matches(entry, facts)), "")


def _has_symptom(cause: Cause, failed: list[Entry], messages: dict[int, str]) -> bool:
    """Whether a failed comparison shows the cause; messages about other missing rules do not count."""
    return any(cause.explains(entry) and messages[id(entry)] in {"", cause.code, "HD405"} for entry in failed)


def _code_of_cause(entry: Entry, causes: Sequence[Cause], message: str) -> str:
    if about_batches(entry):
        unequal = _UNEQUAL_BATCHES | (_RAISE_IN_BATCHES if entry.status in {"raises", "fails"} else set())
        found = [cause.code for cause in causes if cause.code in unequal and message in {"", "HD106"}]
        return found[0] if found else message
    if message:
        return message
    codes = [cause.code for cause in causes if _accounts_for(cause, entry)]
    codes += [cause.code for cause in causes if _spoils_differences(cause, entry)]
    codes += [cause.code for cause in causes if _is_right_to_a_tolerance(cause, entry)]
    return next(iter(codes), "")


def _accounts_for(cause: Cause, entry: Entry) -> bool:
    """Whether the comparison follows from the defect; unreliable numbers may also be NaN, or never settle."""
    return cause.explains(entry) or (entry.status in {"non-smooth", "non-finite"} and cause.code in UNRELIABLE)


def _spoils_differences(cause: Cause, entry: Entry) -> bool:
    """Whether the differences of gradients that an entry is compared with are unreliable."""
    return cause.code in UNRELIABLE and entry.order > 1 and entry.quantity == "vs differences"


def _is_right_to_a_tolerance(cause: Cause, entry: Entry) -> bool:
    """Whether a gradient computed outside of the graph is within the tolerance of a solver, such as an adjoint."""
    small = entry.error is not None and entry.error < _SOLVER_ERROR
    return cause.code in _CUTS and small and entry.status == "wrong" and entry.order == 1


def _first_order_code(entry: Entry, codes: set[str]) -> str:
    """Blame a rule that is wrong at first order for errors at higher orders."""
    modes = modes_of(entry)
    if "HD101" in codes and "reverse" in modes:
        return "HD101"
    return "HD102" if "HD102" in codes and "forward" in modes else "HD115"


def _non_smooth_cause(failed: list[Entry], causes: Sequence[Cause], settled: frozenset[int]) -> list[Cause]:
    """Return the cause for entries that are not smooth or not finite; it explains all orders from their lowest."""
    noise = [cause for cause in causes if cause.code in _UNEQUAL_BATCHES | _NOISY]
    broken = [
        entry
        for entry in failed
        if entry.status in {"non-finite", "non-smooth"} and not any(_accounts_for(cause, entry) for cause in noise)
    ]
    if not broken:
        return []
    first = min(broken, key=lambda entry: entry.order)
    code = "HD112" if first.status == "non-finite" and first.order in settled else "HD901"
    evidence = f"at order {first.order} {first.detail}" if first.detail else f"at order {first.order}"
    return [Cause(code, (evidence,), lambda entry: entry.order >= first.order and not about_batches(entry))]


def _inner_gradient_cause(messages: dict[int, str]) -> list[Cause]:
    """Return the cause for failures of gradcheck if forward mode finds no graph inside."""
    if "HD411" not in messages.values():
        return []
    return [Cause("HD411", (), lambda entry: entry.route.endswith("gradcheck") and entry.status == "fails")]


def _nesting_cause(failed: list[Entry], causes: Sequence[Cause], messages: dict[int, str]) -> list[Cause]:
    """Return the cause HD114 if only forward-over-forward is wrong, as torch hides the outer pass from a jvp."""
    second = [
        entry
        for entry in failed
        if entry.order == 2
        and entry.status in {"zero", "wrong", "fails"}
        and len(modes_of(entry)) == 2
        and not messages[id(entry)]
        and not any(cause.explains(entry) or _spoils_differences(cause, entry) for cause in causes)
    ]
    stopped = any(modes_of(entry) == ["reverse", "forward"] and entry.order == 2 for entry in failed)
    if not second or stopped or any(modes_of(entry) != ["forward", "forward"] for entry in second):
        return []
    evidence = ("forward-over-forward is wrong, and reverse-over-forward is right",)
    return [Cause("HD114", evidence, lambda entry: modes_of(entry).count("forward") > 1)]


def _finding(code: str, entries: list[Entry], causes: list[Cause], location: str) -> Finding:
    defect = CODES[code]
    why, remedy = defect.cause, defect.remedy
    if defect.in_function and causes and all(cause.in_function for cause in causes):
        why, remedy = defect.in_function
    spoken = [] if code in _WITHOUT_MESSAGE else entries
    details = tuple(dict.fromkeys(entry.detail for entry in spoken if entry.detail))
    observed = (*(text for cause in causes for text in cause.evidence), *details[:3], *_worst_error(entries))
    evidence = tuple(dict.fromkeys(observed))
    message = evidence[0] if evidence else why
    # Causes with the same code may differ in severity.
    severities = [cause.severity or defect.severity for cause in causes]
    return make_finding(
        code,
        entries,
        f"{why.removesuffix('.')}: {message.removesuffix('.')}." if evidence else why,
        evidence,
        next((cause.location for cause in causes if cause.location), location),
        remedy=remedy,
        message=message,
        severity=worst_severity(severities) if severities else "",
        route=routes_of(entries) or "rules",
    )


def _worst_error(entries: list[Entry]) -> tuple[str, ...]:
    """Return the numbers of the worst comparison."""
    numbers = [(entry.error, entry) for entry in entries if entry.error is not None and entry.tolerance is not None]
    if not numbers:
        return ()
    # NaN is worse than anything.
    error, worst = max(numbers, key=lambda pair: (pair[0] != pair[0], pair[0]))
    quantities = ", ".join(dict.fromkeys(entry.quantity for entry in entries))
    return (f"{worst.route}: relative error {error:.1e}, tolerance {worst.tolerance:.1e} ({quantities})",)
