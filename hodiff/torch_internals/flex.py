"""Interception of torch's `flex_attention`, a Python function whose calls no mode sees."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import flex_attention as room
from torch.overrides import handle_torch_function

from hodiff.torch_internals.interception import active_function_modes
from hodiff.torch_internals.tensors import stands_for_tensor

# The operator that torch's function calls after checking its arguments; modes see it.
flex_operator = torch.ops.higher_order.flex_attention
torch_flex_attention = room.flex_attention

_in_modes: Callable[[], bool] = torch._C._is_torch_function_mode_enabled
# The modes that intercept the calls.
_takers: list[type] = []


def offer_flex_attention_to(mode: type) -> None:
    """Let a class of modes, and tensor-like objects, see calls of the function, whatever name was imported.

    In code traced by dynamo, modes see the operator instead. There torch's function refuses gradients on a CPU, which
    the mode's operator may support, so that check is skipped if a mode is active.
    """
    if not _takers:
        _offer()
        _allow_gradients_in_graphs()
    _takers.append(mode)


def _offer() -> None:
    public: Any = torch_flex_attention
    own: Any = types.FunctionType(public.__code__, public.__globals__, public.__name__, public.__defaults__)
    own.__kwdefaults__ = public.__kwdefaults__

    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return own(*args, **kwargs)
        for each in (*args, *kwargs.values()):
            if stands_for_tensor(each):
                return each.__torch_function__(public, (type(each),), args, kwargs)
        if _in_modes() and any(isinstance(mode, tuple(_takers)) for mode in active_function_modes()):
            return handle_torch_function(public, (), *args, **kwargs)
        return own(*args, **kwargs)

    public.__signature__ = inspect.signature(own)
    public.__code__, public.__defaults__, public.__kwdefaults__ = _calls.__code__, None, {"_call": call}


def _calls(*args: Any, _call: Any, **kwargs: Any) -> Any:
    return _call(*args, **kwargs)


def _allow_gradients_in_graphs() -> None:
    try:
        require = room._validate_device
    except AttributeError:  # another version of torch, which refuses gradients
        return

    def require_device(*args: Any) -> None:
        if not (torch.compiler.is_compiling() and _in_modes()):
            require(*args)

    room._validate_device = require_device  # type: ignore[assignment]  # of the same arguments
