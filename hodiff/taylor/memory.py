"""What a pass computed, for the next pass of the same function, whose series are longer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hodiff.taylor.jets import Jet, is_plain_tensor
from hodiff.taylor.series import Coefficient, Coefficients
from hodiff.torch_internals.autograd.wrapped_tensors import is_wrapped

# Constants that f makes anew in each pass, up to this size, are compared by their numbers.
SMALL = 64
# What is compared as Python does, so that other objects have to be the same ones.
_PLAIN = (int, float, complex, str, slice, torch.dtype, torch.device)


class Memory:
    """Coefficients of a pass, which the next one takes up and goes on from.

    Both call rules in one order. A call is taken up if it is the same rule with the same arguments, whose series may
    have become longer; else it is computed as if nothing was known.
    """

    def __init__(self) -> None:
        self._before: list[tuple[Any, Any, Any]] = []
        self._now: list[tuple[Any, Any, Any]] = []

    def begin(self) -> None:
        """Start a pass."""
        self._before, self._now = self._now, []

    def recall(self, rule: Any, series: Sequence[Coefficients], constants: Any) -> list[Any]:
        """What the pass before kept of this call; jets among the constants are series, too."""
        seen = (*map(_Series, series), _seen(constants))
        kept: list[Any] = []
        if len(self._now) < len(self._before):
            known_rule, known, found = self._before[len(self._now)]
            if known_rule == rule and _goes_on(seen, known):
                kept = found
        self._now.append((rule, seen, kept))
        return kept


class _Series(tuple[Coefficient, ...]):
    """The coefficients of an argument at the time of the call."""

    __slots__ = ()


def _seen(tree: Any) -> Any:
    if isinstance(tree, Jet):
        return _Series(tree.coefficients)
    if isinstance(tree, (list, tuple)):
        return tuple(_seen(each) for each in tree)
    if isinstance(tree, dict):
        return {key: _seen(each) for key, each in tree.items()}
    return tree


def _goes_on(new: Any, old: Any) -> bool:
    """Whether arguments are those of before, or longer series that begin as they did."""
    if new is old:
        return True
    if isinstance(new, _Series):
        return isinstance(old, _Series) and _begins_as(new, old)
    if isinstance(new, torch.Tensor) or isinstance(old, torch.Tensor):
        return _equal_constants(new, old)
    if type(new) is not type(old):
        return False
    if isinstance(new, tuple):
        return len(new) == len(old) and all(_goes_on(a, b) for a, b in zip(new, old, strict=True))
    if isinstance(new, dict):
        return new.keys() == old.keys() and all(_goes_on(new[key], old[key]) for key in new)
    return isinstance(new, _PLAIN) and new == old


def _begins_as(new: Sequence[Coefficient], old: Sequence[Coefficient]) -> bool:
    return len(new) >= len(old) and all(_goes_on(a, b) for a, b in zip(new, old, strict=False))


def _equal_constants(new: Any, old: Any) -> bool:
    """Whether tensors that are not the same object are the same small constant."""
    if not (is_plain_tensor(new) and is_plain_tensor(old)):
        return False
    if new.shape != old.shape or new.dtype != old.dtype or new.requires_grad != old.requires_grad:
        return False
    # Asking a device for the answer would wait for it.
    if is_wrapped(new) or is_wrapped(old) or new.device.type != "cpu" or old.device.type != "cpu":
        return False
    return new.numel() <= SMALL and torch.equal(new, old)
