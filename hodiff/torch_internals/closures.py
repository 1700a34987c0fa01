"""Closures of optimizers in PyTorch Lightning."""

from __future__ import annotations

import functools
import inspect
from contextlib import suppress
from typing import Any


def skips_backward(closure: Any) -> bool:
    """Whether this is a closure of Lightning that leaves out the backward pass."""
    # `StochasticWeightAveraging` does so in its last pass, which computes statistics of batch norm.
    closure = inspect.unwrap(closure)
    for each in closure.args if isinstance(closure, functools.partial) else (closure,):
        with suppress(AttributeError):
            if each._backward_fn is None:
                return True
    return False
