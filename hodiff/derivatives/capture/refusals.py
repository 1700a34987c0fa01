"""Errors for functions that cannot be captured as a graph, and their explanations.

Source lines of the user at which an operator ran or an exception was raised.
"""

from __future__ import annotations

import inspect
import linecache
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from torch import Tensor, nn

from hodiff.torch_internals.interception import MODULES_BELOW, MODULES_OF_CONTROL_FLOW
from hodiff.torch_internals.wording import Wording, says

# Packages whose frames lie between a user's line and torch.
_BETWEEN = {"torch", "hodiff"} | sys.stdlib_module_names
# Modules that intercept operators, between them and their caller.
_WATCHING = (
    "hodiff.corrections.mechanism.mode",
    "hodiff.derivatives.capture.refusals",
    "hodiff.recompute.reachable",
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


class CaptureError(Exception):
    """A graph of the function would be wrong; the message says why and what to do."""


class HiddenTensorError(CaptureError):
    """A graph reads a tensor that is not one of its inputs.

    Args:
        tensor: The tensor.
        where: The line that reads it, if known.
    """

    def __init__(self, tensor: Tensor, where: str = ""):
        self.tensor = tensor
        numbers = ", ".join(f"{each:g}" for each in tensor.flatten()[:3].tolist()) if _has_numbers(tensor) else ""
        more = ", ..." if tensor.numel() > 3 else ""
        super().__init__(
            f"it reads a tensor of shape {tuple(tensor.shape)} and dtype {str(tensor.dtype).removeprefix('torch.')}"
            f"{f', numbers {numbers}{more},' * bool(numbers)}{f' at {where},' * bool(where)} that is neither an "
            "argument nor found in what it closes over, so that a change would go unseen; pass it as an argument"
        )


def _has_numbers(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter) and tensor.is_floating_point() and not tensor.is_meta


class RandomNumbersError(CaptureError):
    """A function draws random numbers, and a graph would draw different ones."""

    def __init__(self, operator: str):
        super().__init__(
            f"it draws random numbers ({operator}), which a graph would not draw from the same generator; draw them "
            "before and pass them as an argument, or call model.eval()"
        )


class VectorReadError(CaptureError):
    """A product branches on the vector, so that it is not linear in it."""

    def __init__(self, where: str):
        super().__init__(f"{where} reads numbers of what depends on the vector, which is another one in each product")


# Conditions on torch's error for a failed trace, with its meaning and remedy.
_MEANINGS = (
    (
        lambda error: type(error).__name__ == "FakeTensorDeviceMismatchError" and "meta" in str(error),
        "torch cannot trace forward mode inside of what is differentiated once more, as by torch.func.hessian, jacfwd "
        "and jvp; use torch.func.grad and jacrev there, which are traced",
    ),
    (
        lambda error: type(error).__name__ in ("DataDependentOutputException", "DynamicOutputShapeException"),
        "the size or the number that {said} returns depends on the values of a tensor; use an operator whose result "
        "has a fixed shape, such as torch.where or a product with a mask",
    ),
    (
        lambda error: says(error, Wording.NO_NUMBERS),
        "it takes numbers out of torch, as NumPy does, so that what becomes of them is in no graph; compute it with "
        "torch, or pass it as an argument",
    ),
)


def explained(error: Exception) -> str:
    """Explain why a capture failed, at which line of the user's code, and what to do."""
    said = (str(error).strip().splitlines() or [""])[0][:200]
    if isinstance(error, CaptureError):
        cause = str(error)
    else:
        meanings = (words.format(said=said) for fits, words in _MEANINGS if fits(error))
        cause = next(meanings, f"torch cannot trace or compile it ({type(error).__name__}: {said})")
    where = line_of(error)
    return f"{cause} (at {where})" if where else cause
