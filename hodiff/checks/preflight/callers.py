"""Who makes the calls that a mode sees: the model, hodiff's own functions, or the rules of a custom Function."""

from __future__ import annotations

import inspect
from types import FrameType

_HERE = __name__.rpartition(".")[0]


def model_called() -> bool:
    """Whether the model made the running call, and not hodiff or the `forward` of a Function, which have own rules."""
    nearest = ""
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        if not name.startswith(_HERE):
            if name == "torch.autograd.function" and frame.f_code.co_name == "apply":
                return False
            nearest = nearest or ("" if name.partition(".")[0] == "torch" else name)
        elif nearest:
            break
        frame = frame.f_back
    return not nearest.startswith("hodiff.")
