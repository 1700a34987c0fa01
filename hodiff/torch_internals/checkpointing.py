"""Interception of `torch.utils.checkpoint.checkpoint`, a Python function whose calls no mode sees."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from hodiff.torch_internals.compilers.dynamo import hide_from_dynamo

Call = Callable[..., Any]


def reroute_checkpoints(route: Callable[..., Any]) -> None:
    """Redirect every call to `route`, whatever name was imported; torch's own function is the first argument.

    The public function only keeps dynamo away from the inner one, and reads an attribute of it that holds a disabled
    copy. This attribute is set here. If a version of torch does not read it, nothing is redirected.
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
    """Redirect functions that are decorated as checkpoints, which torch supports from 2.15 on."""
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
