"""Where an exception was raised: by torch, or by a statement of the user's own code."""

from __future__ import annotations

import dis
from types import TracebackType

# Methods of a Function by which its author says what it lacks.
_RULES = {"backward", "vjp", "jvp", "vmap"}
_LIBRARIES = {"torch", "hodiff"}


def raised_by_user(error: BaseException) -> bool:
    """Whether a `raise` outside of torch and hodiff made the exception, and not one in a rule of a Function."""
    steps = []
    step = error.__traceback__
    while step is not None:
        steps.append(step)
        step = step.tb_next
    theirs = [each for each in steps if not _in_library(each)]
    if not theirs or theirs[-1] is not steps[-1] or any(each.tb_frame.f_code.co_name in _RULES for each in theirs):
        return False
    # What torch's operators raise comes from the call of them, as they have no frames of their own.
    return dis.opname[steps[-1].tb_frame.f_code.co_code[steps[-1].tb_lasti]] == "RAISE_VARARGS"


def _in_library(step: TracebackType) -> bool:
    return str(step.tb_frame.f_globals.get("__name__", "")).partition(".")[0] in _LIBRARIES
