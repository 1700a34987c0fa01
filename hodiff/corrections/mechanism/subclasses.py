"""Calls with subclasses of Tensor among the arguments, whose own `__torch_function__` runs before any rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from hodiff.common.trees import as_plain
from hodiff.corrections.mechanism.registry import Correction
from hodiff.corrections.mechanism.unseen_calls import is_wrong
from hodiff.errors import RouteError

R = TypeVar("R", bound=Callable[..., Any])

# Rules for functions called with torch's own subclasses, which would compute them where no rule applies.
_RULES: dict[Any, Callable[..., Any]] = {}


def for_subclasses(function: Any) -> Callable[[R], R]:
    """Register a rule for a function's eager calls with subclasses; it may return NotImplemented."""

    def entered(rule: R) -> R:
        _RULES[function] = rule
        return rule

    return entered


class _Seen(TorchFunctionMode):
    """Mode that records whether any torch function is called."""

    def __init__(self) -> None:
        super().__init__()
        self.any = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.any = True
        return func(*args, **(kwargs or {}))


def ask_subclasses(
    mode: TorchFunctionMode, correction: Correction | None, func: Any, types: Sequence[type], args: Any, kwargs: Any
) -> Any:
    """Run a call by the subclasses' `__torch_function__`, in torch's order, with the mode active inside."""
    if any(not issubclass(each, Tensor) or getattr(each, "is_stand_in", False) for each in types):
        return func(*args, **kwargs)  # a stand-in for a tensor, such as what torch.fx traces by, or a jet
    if func in _RULES and not torch.compiler.is_compiling():
        result = _RULES[func](*args, **kwargs)
        if result is not NotImplemented:
            return result
    at_stake = correction is not None and is_wrong(correction, (args, kwargs))
    for each in types:
        with mode, _Seen() as seen:
            result = each.__torch_function__(func, types, args, kwargs)  # type: ignore[attr-defined]
        if result is not NotImplemented:
            if at_stake and correction is not None and not seen.any:
                raise _hidden(correction, each)
            return result
    return func(*args, **kwargs)  # torch's error


def without_subclasses(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the arguments of a subclass's call as plain tensors, unless the call is in place."""
    # A rule saves its arguments, and its backward would call the subclass where torch's backward does not.
    if getattr(func, "__name__", "").endswith("_"):
        return args, kwargs
    return pytree.tree_map_only(Tensor, as_plain, (tuple(args), kwargs))


def _hidden(correction: Correction, subclass: type) -> RouteError:
    """Return the error for a call that a subclass makes where no mode sees it."""
    name = subclass.__name__
    return RouteError(
        f"{correction.name}: {name}.__torch_function__ calls it where hodiff's rules do not reach, as within "
        "DisableTorchFunction(), and torch's own derivative of it is wrong by "
        f"{', '.join(correction.routes)}: "
        f"{correction.reason}. Take the route 'reverse-over-reverse', pass x.as_subclass(torch.Tensor), or let "
        f"{name}.__torch_function__ call functions by super().__torch_function__."
    )
