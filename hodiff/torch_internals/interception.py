"""Modes that see every torch function or operator, and calls of `flex_attention`, which no mode sees."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import overrides
from torch._functorch import eager_transforms
from torch._functorch.autograd_function import custom_function_call
from torch.nn.attention import flex_attention as room
from torch.overrides import TorchFunctionMode, handle_torch_function
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from hodiff.torch_internals.autograd.grad_mode import dispatch_mode_count as dispatch_mode_count
from hodiff.torch_internals.tensors import is_zero_without_memory, stands_for_tensor

active_function_modes: Callable[[], list[TorchFunctionMode]] = overrides._get_current_function_mode_stack
function_mode_count: Callable[[], int] = torch._C._len_torch_function_stack
# The function that `Function.apply` calls inside `torch.func` transforms; modes see it as `(function, *inputs)`.
apply_in_transform: Callable[..., Any] = custom_function_call
# Whether a function asks the subclasses among its arguments; False while a subclass runs torch's own function.
subclasses_are_asked: Callable[[], bool] = torch._C._is_torch_function_enabled

# Whether `torch.autocast` is on for any kind of device.
autocasts: Callable[[], bool] = torch._C._is_any_autocast_enabled

DispatchMode = TorchDispatchMode


class RuleMode(TorchFunctionMode):
    """Base class of modes that replace torch functions by rules."""


def rule_mode() -> RuleMode | None:
    """Innermost mode that replaces torch functions by rules, or None."""
    if not function_mode_count():
        return None
    return next((each for each in reversed(active_function_modes()) if isinstance(each, RuleMode)), None)


@contextmanager
def functions_offered() -> Iterator[None]:
    """Make `Function.apply` ask modes and tensor-like objects, as inside a transform, by an idle transform."""
    with eager_transforms.grad_increment_nesting():
        yield


@contextmanager
def without_function_modes(kind: type[TorchFunctionMode]) -> Iterator[None]:
    """Leave the modes of a class within the context, wherever they are on the stack."""
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
    """Enter the modes that are not active, as torch sets modes aside while a mode handles a call."""
    active = {id(mode) for mode in active_function_modes()}
    with ExitStack() as stack:
        for mode in modes:
            if id(mode) not in active:
                stack.enter_context(mode)
        yield


def call_beneath_users_modes(mode: TorchFunctionMode, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a function so that users' modes see it first, and then `mode`; `NotImplemented` without users' modes."""
    held = active_function_modes()
    first = next((i for i, each in enumerate(held) if type(each).__module__.split(".")[0] not in _NOT_USERS), None)
    if first is None:
        return NotImplemented
    _exchange_function_modes([*held[:first], mode, *held[first:]])
    try:
        return function(*args, **kwargs)
    finally:
        _exchange_function_modes(held)


# torch's own modes, such as for a default device, can call functions that have no rule.
_NOT_USERS = ("hodiff", "torch")


def _exchange_function_modes(modes: list[TorchFunctionMode]) -> None:
    while active_function_modes():
        overrides._pop_mode()
    for mode in modes:
        overrides._push_mode(mode)


# Modules of torch whose frames lie between a call and the mode that sees it.
MODULES_BETWEEN = ("torch.overrides", "torch._jit_internal")
# Modules whose frames lie between a line and an operator of a library.
MODULES_OF_LIBRARIES = ("torch._ops", "torch._library")
# Modules whose frames lie between a line and the operators that it runs.
MODULES_BELOW = (*MODULES_BETWEEN, "torch._ops", "torch._tensor", "torch.utils._python_dispatch")

# Modules that decide by values what to run, for users: operators that take functions.
MODULES_OF_CONTROL_FLOW = ("torch._higher_order_ops", "hodiff.corrections.rules.programs")


# Keys for conjugates, negatives and zeros without memory, which are resolved above modes when they are read.
_ABOVE_MODES = (torch._C.DispatchKey.Conjugate, torch._C.DispatchKey.Negative, torch._C.DispatchKey.ZeroTensor)


def run_operator(operator: Any, args: Any, kwargs: Any = None) -> Any:
    """Call an operator from within a computing dispatch mode; use it instead of a bare call."""
    # Under any mode torch excludes these keys, also for the operators inside of a kernel. A kernel that conjugates
    # lazily (`linalg.pinv`) then silently has wrong values. A kernel that passes on zeros without memory (`mul` by a
    # number, in derivatives of forward mode) reads them, and the process crashes.
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
    """Whether any tensor is complex, so that kernels may conjugate it lazily, or zero without memory."""
    return any(
        each.is_complex() or is_zero_without_memory(each)
        if isinstance(each, torch.Tensor)
        else isinstance(each, list | tuple) and _may_be_unwritten(each)
        for each in args
    )


class EagerDispatchMode(TorchDispatchMode):
    """A dispatch mode that dynamo never meets, so operators skip the wrapper that keeps dynamo out."""

    # Whether nothing differentiates the traced graph, so that it may contain operators without derivatives.
    makes_last_graph = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def makes_last_graph() -> bool:
    """Whether an active mode declares that nothing will differentiate the graph that is being made."""
    return bool(dispatch_mode_count()) and any(
        getattr(mode, "makes_last_graph", False) for mode in _get_current_dispatch_mode_stack()
    )


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
