"""Calls of `torch.utils.checkpoint.checkpoint`, which is a function of Python that no mode sees."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from hodiff.torch_internals.compilers.dynamo import hide_from_dynamo

Call = Callable[..., Any]


def reroute_checkpoints(route: Callable[..., Any]) -> None:
    """Let every call go to `route`, by whatever name the function was imported; torch's own is its first argument.

    What users call only keeps dynamo away from the function proper, and for that looks for a stand-in on it. In a
    torch that does so no more nothing is rerouted.
    """
    proper: Any = getattr(checkpoint, "__wrapped__", None)
    if proper is None or "__dynamo_disable" not in checkpoint.__code__.co_consts:
        return
    before: Call | None = getattr(proper, "__dynamo_disable", None)

    @functools.cache
    def own() -> Call:
        return before or torch.compiler.disable(proper)  # dynamo is not loaded before it is called

    def call(*args: Any, **kwargs: Any) -> Any:
        return route(own, *args, **kwargs)

    hide_from_dynamo(call)
    setattr(proper, "__dynamo_disable", call)
    _reroute_decorated(proper, call)


def _reroute_decorated(proper: Call, call: Call) -> None:
    """Let functions that torch from 2.15 on decorates as checkpoints go the same way."""
    try:
        decorated = proper(use_reentrant=False)(_reroute_decorated)
    except TypeError:  # an older torch
        return
    before = type(decorated).__call__

    def rerouted(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        options = self.checkpoint_kwargs
        if kwargs.keys() & options.keys():
            return before(self, *args, **kwargs)
        return call(self.function, *args, **options, **kwargs)

    type(decorated).__call__ = rerouted
