"""Parametrized weights of modules, which `torch.nn.utils.parametrize.cached` keeps whatever the parameters are."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from hodiff.torch_internals.modules import parametrized_anew, parametrized_weights_are_kept

P = ParamSpec("P")
R = TypeVar("R")


def at_another_point(function: Callable[P, R]) -> Callable[P, R]:
    """Compute parametrized weights anew in each call, for `functional_call` with parameters of its own."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if not parametrized_weights_are_kept():
            return function(*args, **kwargs)
        with parametrized_anew():
            return function(*args, **kwargs)

    return run
