"""torch's operators that take functions, such as `torch.cond`, and how they are run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch._higher_order_ops import utils


def run_as_python(asked: Callable[[], bool], ways: Mapping[str, Callable[..., Any] | None]) -> None:
    """Have torch run some of these operators without compiling them first, wherever that is asked for.

    In eager code torch traces an operator and the functions that it takes with dynamo, and differentiates the trace
    once. This stands in front of that step, and does nothing where it is not asked for.

    Args:
        asked: Whether to, at the time of a call.
        ways: What to call, by the name of torch's wrapper of the operator; None for the wrapper itself.
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
