"""What `check` asks of its arguments, and how it names them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from hodiff.checks.scalarize import Problem
from hodiff.errors import InputError

METHODS = ("auto", "directions", "matrices")


def dtypes_of(problem: Problem) -> str:
    """The dtypes of a problem's inputs, for the head of a column."""
    return "in " + "/".join(sorted({str(leaf.dtype).removeprefix("torch.") for leaf in problem.leaves}))


def require_callable(f: Any) -> Callable[..., Any]:
    """Take a function, or a Function's apply."""
    if isinstance(f, type) and issubclass(f, torch.autograd.Function):
        return f.apply
    if not callable(f):
        raise InputError(
            "check: f: expected a callable or a torch.autograd.Function subclass, "
            f"got {type(f).__name__}. Pass the function itself, not its result."
        )
    return f


def require_order(order: Any) -> None:
    """Refuse what is no positive integer."""
    if not isinstance(order, int) or isinstance(order, bool) or order < 1:
        raise InputError(f"check: order: expected a positive integer, got {order!r}.")


def require_method(method: Any) -> None:
    """Refuse an unknown method."""
    if method not in METHODS:
        raise InputError(f"check: method: expected one of {', '.join(map(repr, METHODS))}, got {method!r}.")


def devices_of(args: tuple[Any, ...]) -> list[int]:
    """Whose random state has to be put back."""
    return sorted({
        leaf.device.index or 0 for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor) and leaf.is_cuda
    })


def name_of(f: Any) -> str:
    """What a function is called."""
    return str(getattr(f, "__name__", type(f).__name__))


def title_of(f: Any, problem: Problem) -> str:
    """One line: what is checked, and where."""
    name = name_of(f)
    shapes = ", ".join(f"{str(a.dtype).removeprefix('torch.')}{list(a.shape)}" for a in problem.leaves)
    return f"{name} at {shapes}"
