"""Which of torch's operators the tests audit; `python -m hodiff audit` takes all of them."""

from __future__ import annotations

from hodiff.checks.audit.samples import database
from hodiff.corrections.registry import correction_of

# Where hodiff has no rule its corrections change nothing but that they look at the call.
ONE_IN = 5


def ruled_and_some() -> list[str]:
    """The operators for which hodiff has a rule of its own, and one in five of the others."""
    return [
        name
        for place, (name, entry) in enumerate(database().items())
        if place % ONE_IN == 0 or correction_of(entry.op, ()) is not None
    ]
