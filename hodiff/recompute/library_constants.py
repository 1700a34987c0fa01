"""Constant tensors of installed packages, such as the coefficients of a method."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor

from hodiff.recompute.reachable import LIBRARIES, is_users


def is_library_constant(tensor: Tensor) -> bool:
    """Whether a package holds a tensor among its globals, directly or in a tuple (also of lists)."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in LIBRARIES or name == "__main__" or is_users(name):
            continue
        if any(_holds(value, tensor) for value in list(getattr(module, "__dict__", {}).values())):
            return True
    return False


def _holds(value: Any, tensor: Tensor) -> bool:
    if isinstance(value, tuple):
        held = list(tuple.__iter__(value))
        held += [one for each in held if type(each) is list for one in each]
        return any(each is tensor for each in held)
    return value is tensor
