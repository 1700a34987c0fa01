"""HD9xx: functions that have no defect or cannot be judged."""

from __future__ import annotations

from hodiff.checks.findings.defect import Defect

NOT_DEFECTS = (
    Defect(
        "HD901",
        "error",
        "not smooth here",
        "the point is a kink, a jump or the edge of the domain, where derivatives depend on the side.",
        "Check at another point, or state which derivative is meant.",
    ),
    Defect(
        "HD902",
        "note",
        "derivatives of a surrogate",
        "the function declares derivatives that are not its own; the gap is measured and no defect.",
        "Nothing to do: `approximate=True` says so.",
    ),
    Defect(
        "HD903",
        "error",
        "the function is not deterministic",
        "two calls with the same inputs differ.",
        "Call `module.eval()`, or pass random numbers as an input.",
    ),
)
