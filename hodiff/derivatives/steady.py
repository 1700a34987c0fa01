"""Functions that are evaluated several times for one result, and must return the same value each time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from hodiff.common.module_state import attributes_put_back, buffers_unwrapped, untouched
from hodiff.derivatives.bound_function import BoundFunction
from hodiff.derivatives.gradient_comparison import CoarsestDtype, is_comparing
from hodiff.recompute.contents import numbers_in, require_same
from hodiff.recompute.reachable import draw_of, named_modules
from hodiff.torch_internals.autograd.grad_mode import in_fx_trace
from hodiff.torch_internals.autograd.transforms import outside_transforms


def steady(function: BoundFunction, first: list[Tensor] | None = None) -> BoundFunction:
    """Wrap a function to raise if its result differs from the first one, whose numbers are added to `first`."""
    if torch.compiler.is_compiling() or in_fx_trace():
        return function
    seen = [] if first is None else first
    # A variable of its own, by which a warning tells the user's functions apart.
    inner = function.f
    modules = list(named_modules(inner))

    @cache
    def coarsest() -> float:
        with outside_transforms(), untouched(modules):
            return _coarsest_eps(function)

    def f(*args: Any, **kwargs: Any) -> Any:
        # Buffers are updated only by the first evaluation.
        with untouched(modules) if seen else attributes_put_back(modules):
            result = inner(*args, **kwargs)
        # Finite differences have other points, and other values.
        if is_comparing():
            return result
        is_pair = function.has_aux and isinstance(result, tuple)
        found = [each for each in numbers_in(result[0] if is_pair else result) if not each.is_meta]
        if seen:
            require_same(function.caller, seen, found, coarsest)
        else:
            seen.extend(found)
        return result

    return replace(function, f=f)


def _coarsest_eps(function: BoundFunction) -> float:
    """Evaluate a function once more, and return the machine epsilon of the coarsest dtype in it."""
    draw = draw_of(function.leaves, *function.roots)
    with CoarsestDtype() as dtypes:
        function(function.leaves)
    draw.rewind()
    return dtypes.eps


@contextmanager
def leaving_no_trace(f: Callable[..., Any]) -> Iterator[None]:
    """Return a context for a transform's call of a function, whose modules must not keep the transform's tensors."""
    modules = list(named_modules(f))
    with attributes_put_back(modules), buffers_unwrapped(modules):
        yield
