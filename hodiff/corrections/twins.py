"""Copies of torch's Python functions that do not offer the whole call to a mode first."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hodiff.torch_internals.operators import in_projections

# Functions by which torch's Python functions ask whether a mode is active.
_OFFERS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


@functools.cache
def twin(function: Any) -> Callable[..., Any]:
    """Return a copy of a Python function of torch that offers itself to no mode."""
    replaced = {**dict.fromkeys(_OFFERS, _no_offer), in_projections.__name__: _projections}
    surroundings = {**function.__globals__, **replaced}
    # Without a name, dynamo does not look up the globals in their original module.
    del surroundings["__name__"]
    code, defaults, closure = function.__code__, function.__defaults__, function.__closure__
    twin = types.FunctionType(code, surroundings, function.__name__, defaults, closure)
    twin.__kwdefaults__ = function.__kwdefaults__
    return twin


def _no_offer(*_: Any) -> bool:
    return False


def _projections(q: Tensor, k: Tensor, v: Tensor, w: Tensor, b: Tensor | None = None) -> Any:
    """Compute projections as torch does, without `unflatten`, which dynamo cannot trace while a mode is active."""
    if not torch.compiler.is_compiling():
        return in_projections(q, k, v, w, b)
    biases = (None,) * 3 if b is None else b.chunk(3)
    return tuple(F.linear(*each) for each in zip((q, k, v), w.chunk(3), biases, strict=True))
