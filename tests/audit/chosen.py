"""The operators of torch that the tests audit; `python -m hodiff audit` audits all operators."""

from __future__ import annotations

from hodiff.audit.samples import database
from hodiff.corrections.mechanism.registry import correction_of

# For operators without a rule, corrections only inspect the call, so one operator in twenty is enough.
ONE_IN = 20


def ruled_and_some() -> list[str]:
    """Return the operators for which hodiff has a rule, and every twentieth operator."""
    return [
        name
        for place, (name, entry) in enumerate(database().items())
        if place % ONE_IN == 0 or correction_of(entry.op, ()) is not None
    ]
