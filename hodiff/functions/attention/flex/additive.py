"""Detect functions that only add to a score, by calling them with a symbol for the score."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hodiff.functions.attention.flex.positions import IndexByTensors, Modification
from hodiff.torch_internals.interception import without_function_modes


class _NotAdditiveError(Exception):
    """Raised if an operation on the symbol is not a sum."""


class _Score(Tensor):
    """A symbol for a score plus added terms. It supports only operations that keep it a sum."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return a symbol if the result is a sum, or a property of the symbol; raise otherwise."""
        if func in _PROPERTIES:
            return super().__torch_function__(func, types, args, kwargs)
        rule = _SUMS.get(func)
        # With grad mode off, no derivative is recorded, or the derivative is the rule of a Function.
        if rule is None or not torch.is_grad_enabled() or not rule(*args, **(kwargs or {})):
            raise _NotAdditiveError
        like = next(each for each in args if isinstance(each, _Score))
        return _symbol(like.dtype, like.device)


def is_additive(score_mod: Modification, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether `score_mod` only adds terms that do not depend on the score, or hides the score by -inf."""
    origin = torch.zeros((), dtype=torch.int64, device=device)
    try:
        with without_function_modes(TorchFunctionMode), torch.enable_grad():
            score = _symbol(dtype, device)
            with IndexByTensors():
                return _is_symbol(score_mod(score, origin, origin, origin, origin))
    except Exception:  # the function is then called with scores, and may raise a better error
        return False


def _symbol(dtype: torch.dtype, device: torch.device) -> _Score:
    symbol = torch.zeros((), dtype=dtype, device=device, requires_grad=True).as_subclass(_Score)
    # Other results of a symbol, as from Function.apply, have its type but not this attribute.
    symbol.is_sum = True  # type: ignore[attr-defined]
    return symbol


def _is_symbol(value: Any) -> bool:
    return type(value) is _Score and vars(value).get("is_sum", False)


def _is_free(value: Any) -> bool:
    return not isinstance(value, _Score)


def _add(a: Any, b: Any, *, alpha: Any = 1) -> bool:
    if _is_symbol(a):
        return _is_free(b) and _is_free(alpha)
    return _is_free(a) and _is_symbol(b) and type(alpha) is int and alpha == 1


def _subtract(a: Any, b: Any, *, alpha: Any = 1) -> bool:
    return _is_symbol(a) and _is_free(b) and _is_free(alpha)


def _where(condition: Any, a: Any, b: Any) -> bool:
    """Whether `torch.where` chooses between sums, or between a sum and -inf, which hides the score."""
    return _is_free(condition) and all(_is_symbol(each) or _hides(each) for each in (a, b))


def _masked_fill(a: Any, mask: Any, value: Any) -> bool:
    return _is_symbol(a) and _is_free(mask) and _hides(value)


def _hides(value: Any) -> bool:
    # A tensor may be -inf at one position, and something else at others.
    return type(value) is float and value == -math.inf


_SUMS: dict[Any, Callable[..., bool]] = {
    torch.add: _add,
    Tensor.add: _add,
    Tensor.__add__: _add,
    Tensor.__radd__: _add,
    torch.sub: _subtract,
    torch.subtract: _subtract,
    Tensor.sub: _subtract,
    Tensor.subtract: _subtract,
    Tensor.__sub__: _subtract,
    torch.where: _where,
    torch.masked_fill: _masked_fill,
    Tensor.masked_fill: _masked_fill,
}
_PROPERTIES = {getattr(Tensor, name).__get__ for name in ("dtype", "device", "shape", "ndim", "is_cuda", "layout")} | {
    Tensor.dim,
    Tensor.size,
    Tensor.is_floating_point,
}
