"""What a rule may return in place of a value: it declines the call and says why, or hands it to torch changed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Declined:
    """What a rule returns in place of a value: it declines the call, and why.

    Attributes:
        torch_is_right: Whether torch's own derivatives of this call are right. If not, the call is one that the rule
            should mend and cannot.
        because: The reason, as the end of a sentence that begins with "because".
    """

    torch_is_right: bool
    because: str


@dataclass(frozen=True)
class Redirected:
    """What a rule returns in place of a value: torch's own function does it, with these arguments for the given ones.

    Errors that it then raises are the user's own.
    """

    args: tuple[Any, ...]


# No rule is needed: torch differentiates such a call rightly, or it has no derivatives.
UNNEEDED = Declined(True, "torch differentiates such a call rightly")
# Arguments that torch refuses as well, with the better error.
INVALID = Declined(False, "its arguments do not fit together")


def unable(because: str) -> Declined:
    """Decline a call that torch takes and differentiates wrongly, or not at all.

    Args:
        because: What the rule does not know, as the end of a sentence that begins with "because".

    Returns:
        What the rule returns.

    Example:
        >>> from hodiff.corrections import unable
        >>> unable("the result is written into the input").torch_is_right
        False
    """
    return Declined(False, because)
