"""A kind of defect, with its cause and remedy."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Defect:
    """A kind of defect.

    Attributes:
        code: Its name, as `HD101`.
        severity: "error" (something is wrong or missing), "warning" (it works here, and wastes or fails elsewhere) or
            "note".
        title: What it is, in a few words.
        cause: Why derivatives go wrong, in a sentence.
        remedy: What to change, with a line of code.
    """

    code: str
    severity: str
    title: str
    cause: str
    remedy: str
