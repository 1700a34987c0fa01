"""Description of a kind of defect: its cause and remedy."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Defect:
    """Kind of defect.

    Attributes:
        code: Its name, such as `HD101`.
        severity: "error" (something is wrong or missing), "warning" (it works here, and wastes or fails elsewhere) or
            "note".
        title: The defect, in a few words.
        cause: Why derivatives go wrong, in a sentence.
        remedy: What to change, with a line of code.
    """

    code: str
    severity: str
    title: str
    cause: str
    remedy: str
