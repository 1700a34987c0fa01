"""Functions that are evaluated several times for one result, and must return the same value each time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hodiff.common.module_state import attributes_put_back, buffers_unwrapped, untouched
from hodiff.derivatives.bound_function import BoundFunction
from hodiff.recompute.reachable import named_modules
from hodiff.recompute.same_values import numbers_in, require_same
from hodiff.torch_internals.autograd.recording import in_fx_trace


def steady(function: BoundFunction, first: list[Tensor] | None = None) -> BoundFunction:
    """Wrap a function to raise if its result differs from the first one, whose numbers are added to `first`."""
    if torch.compiler.is_compiling() or in_fx_trace():
        return function
    seen = [] if first is None else first
    modules = list(named_modules(function.f))

    def f(*args: Any, **kwargs: Any) -> Any:
        # Buffers are updated only by the first evaluation.
        with untouched(modules) if seen else attributes_put_back(modules):
            result = function.f(*args, **kwargs)
        is_pair = function.has_aux and isinstance(result, tuple)
        found = [each for each in numbers_in(result[0] if is_pair else result) if not each.is_meta]
        if seen:
            require_same(function.caller, seen, found)
        else:
            seen.extend(found)
        return result

    return replace(function, f=f)


@contextmanager
def leaving_no_trace(f: Callable[..., Any]) -> Iterator[None]:
    """Return a context for a transform's call of a function, whose modules must not keep the transform's tensors."""
    modules = list(named_modules(f))
    with attributes_put_back(modules), buffers_unwrapped(modules):
        yield
