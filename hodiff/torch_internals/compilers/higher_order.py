"""Interception of torch's operators that take functions, such as `torch.cond`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch._higher_order_ops import utils


def run_as_python(asked: Callable[[], bool], ways: Mapping[str, Callable[..., Any] | None]) -> None:
    """Make torch run some of these operators without compiling them first, whenever `asked` returns True.

    In eager code torch traces an operator and its functions with dynamo, and differentiates the trace once. This
    function intercepts that step.

    Args:
        asked: Whether to intercept; evaluated at each call.
        ways: The replacements, by the name of torch's wrapper of the operator; None for the wrapper itself.
    """
    try:
        compiled = utils._hop_compile_and_call
    except AttributeError:  # before torch 2.12
        return

    @functools.wraps(compiled)
    def call(fn: Any, args: Any, kwargs: Any = None) -> Any:
        name = getattr(fn, "__name__", "")
        if name not in ways or not asked():
            return compiled(fn, args, kwargs)
        return (ways[name] or fn)(*args, **(kwargs or {}))

    utils._hop_compile_and_call = call
