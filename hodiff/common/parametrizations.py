"""Parametrized weights of modules, which `torch.nn.utils.parametrize.cached` keeps even for other parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from hodiff.torch_internals.modules import parametrized_anew, parametrized_weights_are_kept

P = ParamSpec("P")
R = TypeVar("R")


def at_another_point(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function to recompute parametrized weights in each call, for `functional_call`."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if not parametrized_weights_are_kept():
            return function(*args, **kwargs)
        with parametrized_anew():
            return function(*args, **kwargs)

    return run
