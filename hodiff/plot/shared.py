"""Helpers that plots share: optional packages, axes, and the one number that a drawn function returns."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hodiff.errors import HodiffError, InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def require_package(module: str, function: str, remedy: str) -> Any:
    """Import an optional package, or raise an error with the way to install it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise HodiffError(f"{function}: needs {module.partition('.')[0]}, which is not installed; {remedy}.") from None


def axes_or_new(ax: Axes | None, function: str, size: tuple[float, float] | None = None) -> Axes:
    """Return the user's axes, or axes of a new figure of a size in inches."""
    if ax is not None:
        return ax
    pyplot = require_package("matplotlib.pyplot", function, 'pip install "hodiff[plot]"')
    return pyplot.subplots(figsize=size, layout="constrained")[1]


def one_number(function: str, y: Any) -> Tensor:
    """Return the result of a drawn function as a tensor of shape (); raise unless it is one real number."""
    if isinstance(y, Tensor) and y.numel() == 1 and y.is_floating_point():
        return y.reshape(()) if y.dim() else y
    got = f"shape {tuple(y.shape)} of {y.dtype}" if isinstance(y, Tensor) else type(y).__name__
    raise InputError(f"{function}: f: expected one real floating-point number in a tensor, got {got}.")
