"""Values that a rule returns to decline a call, or to pass it to torch with other arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Declined:
    """Result of a rule that declines a call, with the reason.

    Attributes:
        torch_is_right: Whether torch's own derivatives of this call are right. If not, the rule should correct the call
            and cannot.
        because: The reason, as the end of a sentence that begins with "because".
    """

    torch_is_right: bool
    because: str


@dataclass(frozen=True)
class Redirected:
    """Result of a rule that passes the call to torch's own function, with other arguments.

    Errors of that call are raised to the user.
    """

    args: tuple[Any, ...]


# No rule is needed: torch differentiates such a call correctly, or it has no derivatives.
UNNEEDED = Declined(True, "torch differentiates such a call rightly")
# Arguments that torch refuses itself, with a better error.
INVALID = Declined(False, "its arguments do not fit together")


def unable(because: str) -> Declined:
    """Decline a call that torch accepts but differentiates wrongly or not at all.

    Args:
        because: The reason, as the end of a sentence that begins with "because".

    Returns:
        The value for the rule to return.

    Example:
        >>> from hodiff.corrections import unable
        >>> unable("the result is written into the input").torch_is_right
        False
    """
    return Declined(False, because)
