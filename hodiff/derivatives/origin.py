"""The origin of an exception: torch, a statement in the user's own code, or a custom Function."""

from __future__ import annotations

import dis
from collections.abc import Iterator
from types import TracebackType

from hodiff.torch_internals.autograd.graph_nodes import called_functions

# Methods of a Function in which its author may raise for a missing derivative.
_RULES = {"backward", "vjp", "jvp", "vmap"}
_LIBRARIES = {"torch", "hodiff"}


def raised_by_user(error: BaseException) -> bool:
    """Whether a `raise` outside of torch and hodiff raised the exception, and not in a rule of a Function."""
    steps = list(_steps(error))
    theirs = [each for each in steps if not _in_library(each)]
    if not theirs or theirs[-1] is not steps[-1] or any(each.tb_frame.f_code.co_name in _RULES for each in theirs):
        return False
    # Torch's operators have no frames, so their errors appear at the call instruction.
    return dis.opname[steps[-1].tb_frame.f_code.co_code[steps[-1].tb_lasti]] == "RAISE_VARARGS"


def met_nested_tensor(error: BaseException) -> bool:
    """Whether torch's rules for jagged nested tensors ran when the exception was raised."""
    return any(str(each.tb_frame.f_globals.get("__name__", "")).startswith("torch.nested.") for each in _steps(error))


def function_at_fault(error: BaseException) -> str:
    """Return the name of the innermost custom Function whose call raised, or ""."""
    functions = called_functions(step.tb_frame for step in _steps(error))
    theirs = [each.__name__ for each in functions if not each.__module__.startswith("hodiff.")]
    return theirs[-1] if theirs else ""


def _steps(error: BaseException) -> Iterator[TracebackType]:
    step = error.__traceback__
    while step is not None:
        yield step
        step = step.tb_next


def _in_library(step: TracebackType) -> bool:
    return str(step.tb_frame.f_globals.get("__name__", "")).partition(".")[0] in _LIBRARIES
