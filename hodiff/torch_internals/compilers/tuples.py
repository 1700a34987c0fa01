"""Tuples of objects that stand for tensors, in compiled code."""

from __future__ import annotations

from typing import Any

from torch.overrides import TorchFunctionMode


class TuplesAsLists(TorchFunctionMode):
    """Hands on `torch.cat((x, y))` as `torch.cat([x, y])`: dynamo looks for them in lists, and not in tuples."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [_as_list(each) for each in args]
        return func(*given, **{name: _as_list(each) for name, each in (kwargs or {}).items()})


def _as_list(argument: Any) -> Any:
    # Sizes and dimensions stay as they are.
    if type(argument) is tuple and any(hasattr(type(each), "__torch_function__") for each in argument):
        return [*argument]
    return argument
