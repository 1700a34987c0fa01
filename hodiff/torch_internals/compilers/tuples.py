"""Tuples of tensor-like objects in compiled code."""

from __future__ import annotations

from typing import Any

from torch.overrides import TorchFunctionMode


class TuplesAsLists(TorchFunctionMode):
    """Passes `torch.cat((x, y))` on as `torch.cat([x, y])`: dynamo finds such objects in lists, not in tuples."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [_as_list(each) for each in args]
        return func(*given, **{name: _as_list(each) for name, each in (kwargs or {}).items()})


def _as_list(argument: Any) -> Any:
    # Tuples of sizes and dimensions are not changed.
    if type(argument) is tuple and any(hasattr(type(each), "__torch_function__") for each in argument):
        return [*argument]
    return argument
