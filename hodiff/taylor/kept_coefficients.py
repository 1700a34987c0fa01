"""Cache of a pass's coefficients, for the next pass of the same function with longer series."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hodiff.taylor.jets import Jet, is_plain_tensor
from hodiff.taylor.series import Coefficient, Coefficients
from hodiff.torch_internals.autograd.wrapped_tensors import is_wrapped

# f may recreate constants in each pass; constants up to this size are compared by value.
SMALL = 64
# Types that are compared by `==`; other objects must be identical.
_PLAIN = (int, float, complex, str, slice, torch.dtype, torch.device)


class Memory:
    """Cache of the coefficients of a pass, which the next pass extends.

    Both passes call rules in the same order. A call continues from the cache if its rule and arguments are the same;
    series may have become longer. Otherwise it is computed from scratch.
    """

    def __init__(self) -> None:
        self._before: list[tuple[Any, Any, Any]] = []
        self._now: list[tuple[Any, Any, Any]] = []

    def begin(self) -> None:
        """Start a pass."""
        self._before, self._now = self._now, []

    def recall(self, rule: Any, series: Sequence[Coefficients], constants: Any) -> list[Any]:
        """Return what the previous pass cached for this call; jets among the constants count as series."""
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
    """Whether arguments equal the old arguments, or are longer series that begin with the old series."""
    if new is old:
        return True
    if isinstance(new, _Series):
        longer = isinstance(old, _Series) and len(new) >= len(old)
        return longer and all(_goes_on(a, b) for a, b in zip(new, old, strict=False))
    if isinstance(new, torch.Tensor) or isinstance(old, torch.Tensor):
        return _equal_constants(new, old)
    if type(new) is not type(old):
        return False
    if isinstance(new, tuple):
        return len(new) == len(old) and all(_goes_on(a, b) for a, b in zip(new, old, strict=True))
    if isinstance(new, dict):
        return new.keys() == old.keys() and all(_goes_on(new[key], old[key]) for key in new)
    return isinstance(new, _PLAIN) and new == old


def _equal_constants(new: Any, old: Any) -> bool:
    """Whether two tensor objects are equal small constants."""
    if not (is_plain_tensor(new) and is_plain_tensor(old)):
        return False
    if new.shape != old.shape or new.dtype != old.dtype or new.requires_grad != old.requires_grad:
        return False
    # Comparing values on a device would synchronize with it.
    if is_wrapped(new) or is_wrapped(old) or new.device.type != "cpu" or old.device.type != "cpu":
        return False
    return new.numel() <= SMALL and torch.equal(new, old)
