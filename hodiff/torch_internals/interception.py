"""Modes that see every torch function, or every operator."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import overrides
from torch._functorch import eager_transforms
from torch._functorch.autograd_function import custom_function_call
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from hodiff.torch_internals.tensors import is_zero_without_memory

active_function_modes: Callable[[], list[TorchFunctionMode]] = overrides._get_current_function_mode_stack
function_mode_count: Callable[[], int] = torch._C._len_torch_function_stack
# What `Function.apply` calls inside transforms of `torch.func`, and modes see: `(function, *inputs)`.
apply_in_transform: Callable[..., Any] = custom_function_call
dispatch_mode_count: Callable[[], int] = torch._C._len_torch_dispatch_stack
# Whether a function offers itself to the subclasses among its arguments; not while one of them runs torch's own.
subclasses_are_asked: Callable[[], bool] = torch._C._is_torch_function_enabled

# Whether `torch.autocast` is on for any kind of device.
autocasts: Callable[[], bool] = torch._C._is_any_autocast_enabled

DispatchMode = TorchDispatchMode


class RuleMode(TorchFunctionMode):
    """Base class of modes that replace torch functions by rules."""


@contextmanager
def functions_offered() -> Iterator[None]:
    """`Function.apply` asks modes, and objects that stand for tensors, as it does inside a transform: an idle one."""
    with eager_transforms.grad_increment_nesting():
        yield


@contextmanager
def without_function_modes(kind: type[TorchFunctionMode]) -> Iterator[None]:
    """Leave the modes of a kind for a while, wherever on the stack they are."""
    held = active_function_modes()
    kept = [mode for mode in held if not isinstance(mode, kind)]
    if len(kept) == len(held):
        yield
        return
    _exchange_function_modes(kept)
    try:
        yield
    finally:
        _exchange_function_modes(held)


@contextmanager
def in_function_modes(modes: Sequence[TorchFunctionMode]) -> Iterator[None]:
    """Enter those of the modes that are not active: torch sets them aside while one of them handles a call."""
    active = {id(mode) for mode in active_function_modes()}
    with ExitStack() as stack:
        for mode in modes:
            if id(mode) not in active:
                stack.enter_context(mode)
        yield


def call_beneath_users_modes(mode: TorchFunctionMode, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a function that users' modes see first, and then a mode that is set aside; `NotImplemented` without any."""
    held = active_function_modes()
    first = next((i for i, each in enumerate(held) if type(each).__module__.split(".")[0] not in _NOT_USERS), None)
    if first is None:
        return NotImplemented
    _exchange_function_modes([*held[:first], mode, *held[first:]])
    try:
        return function(*args, **kwargs)
    finally:
        _exchange_function_modes(held)


# torch's modes, such as that of a default device, ask for functions that have no rule.
_NOT_USERS = ("hodiff", "torch")


def _exchange_function_modes(modes: list[TorchFunctionMode]) -> None:
    while active_function_modes():
        overrides._pop_mode()
    for mode in modes:
        overrides._push_mode(mode)


# Of torch's modules those whose frames lie between a call and the mode that sees it.
MODULES_BETWEEN = ("torch.overrides", "torch._jit_internal")
# Those between a line and an operator of a library.
MODULES_OF_LIBRARIES = ("torch._ops", "torch._library")
# And those whose frames lie between a line and the operators that it runs.
MODULES_BELOW = (*MODULES_BETWEEN, "torch._ops", "torch._tensor", "torch.utils._python_dispatch")

# Those that choose what runs by values, for users: operators that take functions.
MODULES_OF_CONTROL_FLOW = ("torch._higher_order_ops", "hodiff.corrections.programs")


# Outside of a mode they stand above what modes see: conjugates, negatives and zeros are written out when they are read.
_ABOVE_MODES = (torch._C.DispatchKey.Conjugate, torch._C.DispatchKey.Negative, torch._C.DispatchKey.ZeroTensor)


def run_operator(operator: Any, args: Any, kwargs: Any = None) -> Any:
    """Call an operator from within a dispatch mode that computes, in place of the bare call."""
    # Under any mode torch excludes these keys, also for the operators that a kernel is made of: one that conjugates
    # without writing it out (`linalg.pinv`) has wrong values, in silence, and one that passes on zeros that have no
    # memory (`mul` by a number, in derivatives of forward mode) reads it, and the process dies.
    if not _may_be_unwritten(args):
        return operator(*args, **(kwargs or {}))
    excluded = [key for key in _ABOVE_MODES if torch._C._dispatch_tls_is_dispatch_key_excluded(key)]
    for key in excluded:
        torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
    try:
        return operator(*args, **(kwargs or {}))
    finally:
        for key in excluded:
            torch._C._dispatch_tls_set_dispatch_key_excluded(key, True)


def _may_be_unwritten(args: Any) -> bool:
    """Whether some tensor is complex, which kernels may conjugate, or zeros without memory."""
    return any(
        each.is_complex() or is_zero_without_memory(each)
        if isinstance(each, torch.Tensor)
        else isinstance(each, list | tuple) and _may_be_unwritten(each)
        for each in args
    )


class EagerDispatchMode(TorchDispatchMode):
    """A dispatch mode that dynamo never meets: each operator is spared the wrapper that keeps dynamo out."""

    # Whether nothing differentiates what is traced below, so that operators without derivatives may stand in it.
    makes_last_graph = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def makes_last_graph() -> bool:
    """Whether some mode says that nothing will differentiate the graph that is being made."""
    modes: list[Any] = _get_current_dispatch_mode_stack() if dispatch_mode_count() else []
    return any(getattr(mode, "makes_last_graph", False) for mode in modes)
