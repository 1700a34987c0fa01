"""Source lines of the user at which an operator ran or an exception was raised."""

from __future__ import annotations

import inspect
import linecache
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from hodiff.torch_internals.interception import MODULES_BELOW, MODULES_OF_CONTROL_FLOW

# Packages whose frames lie between a user's line and torch.
_BETWEEN = {"torch", "hodiff"} | sys.stdlib_module_names
# Modules that intercept operators, between them and their caller.
_WATCHING = (
    "hodiff.corrections.mode",
    "hodiff.derivatives.capture.users_lines",
    "hodiff.recompute.hidden_tensors",
    "hodiff.sparse.detection",
    *MODULES_BELOW,
)


def line_now() -> str:
    """Return the innermost running line outside of torch and hodiff, or "" if there is none."""
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        if _is_users(frame):
            return _told(frame, frame.f_lineno)
        frame = frame.f_back
    return ""


def called_by_library() -> bool:
    """Whether torch's own Python or a correction called the running operator; such calls must not decide branches."""
    frame: FrameType | None = inspect.currentframe()
    while frame is not None and str(frame.f_globals.get("__name__")).startswith(_WATCHING):
        frame = frame.f_back
    if frame is None:
        return False
    name = str(frame.f_globals.get("__name__"))
    return name.partition(".")[0] in {"torch", "hodiff"} and not name.startswith(MODULES_OF_CONTROL_FLOW)


def line_of(error: BaseException) -> str:
    """Return the innermost line outside of torch and hodiff that an exception passed through, or ""."""
    lines = [_told(frame, number) for frame, number in _passed(error) if _is_users(frame)]
    return lines[-1] if lines else ""


def _passed(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    step = error.__traceback__
    while step is not None:
        yield step.tb_frame, step.tb_lineno
        step = step.tb_next


def _is_users(frame: FrameType) -> bool:
    # Code that torch generates has no module, and a script's module has the name of one of Python's.
    name = str(frame.f_globals.get("__name__", "torch"))
    return name == "__main__" or name.partition(".")[0] not in _BETWEEN


def _told(frame: FrameType, number: int) -> str:
    file = frame.f_code.co_filename
    source = linecache.getline(file, number, frame.f_globals).strip()
    place = f"{Path(file).name}:{number}, in {frame.f_code.co_name}"
    return f"{place}, `{source}`" if source else place
