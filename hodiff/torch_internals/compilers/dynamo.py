"""Settings and markers for dynamo, which is not loaded before something is compiled."""

from __future__ import annotations

import functools
import re
import sys
import threading
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch
from torch.overrides import TorchFunctionMode, get_overridable_functions

from hodiff.torch_internals.operators import zeros_without_memory


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


def in_one_graph() -> AbstractContextManager[Any]:
    """Return a context in which a graph break is an error; call it only while a compiler traces."""
    return torch._dynamo.error_on_graph_break(True)


F = TypeVar("F", bound=Callable[..., Any])

# Operators for which hodiff's lowering is registered in inductor.
_written_out: set[Any] = set()
# Attributes that torch.compile adds to functions.
_OF_COMPILED_CODE = {
    "_isolate_recompiles_id",
    "_torchdynamo_inline",
    "_torchdynamo_orig_callable",
    "_torchdynamo_wrapper_id",
    "aot_compile",
    "get_compiler_config",
}
# Callbacks of each call of compiled code: whether to run the original function instead.
_askers: list[Callable[[], bool]] = []
# The setting of a `compiled_code` block, which takes precedence over the callbacks.
_said: ContextVar[bool | None] = ContextVar("said", default=None)


def is_dynamo_loaded() -> bool:
    """Whether dynamo has been imported; without it nothing can be traced."""
    return "torch._dynamo" in sys.modules


def dynamo_watches() -> bool:
    """Whether compiled code calls this code outside of its graphs, and dynamo would compile what it calls."""
    return is_dynamo_loaded() and torch._C._dynamo.eval_frame.get_eval_frame_callback() not in (None, False)


def module_of(value: Any) -> Any:
    """Return the module inside of a compiled module; return anything else unchanged."""
    while is_dynamo_loaded() and isinstance(value, torch._dynamo.OptimizedModule):
        value = value._orig_mod
    return value


def original_of(value: Any) -> Any:
    """Return the module or function that was compiled; return anything else unchanged."""
    value = module_of(value)
    while getattr(value, "_torchdynamo_wrapper_id", None) == id(value):
        value = value._torchdynamo_orig_callable
        # dynamo wraps torch's own functions in a frame first.
        if getattr(value, "__code__", None) is not None and value.__code__.co_filename == _frames_file():
            value = value.__wrapped__
    return value


def _frames_file() -> str:
    from torch._dynamo.external_utils import wrap_inline

    file: str = wrap_inline.__code__.co_filename
    return file


def run_uncompiled_where(asked: Callable[[], bool]) -> None:
    """Run the original functions instead of compiled code whenever a callback returns True."""
    _askers.append(asked)


@contextmanager
def compiled_code(runs: bool) -> Iterator[None]:
    """Set whether compiled code runs within the context; if not, the original function runs."""
    watch_compiled_code()
    token = _said.set(runs)
    try:
        yield
    finally:
        _said.reset(token)


def uncompiled_in_traces() -> AbstractContextManager[Any]:
    """Let `make_fx` trace the original of a compiled function, which dynamo otherwise refuses."""
    return torch._dynamo.config.patch(error_on_nested_fx_trace=False) if is_dynamo_loaded() else nullcontext()


def watch_compiled_code() -> None:
    """Install the callbacks of compiled code, if the compiler is loaded."""
    if is_dynamo_loaded() and not isinstance(stance := torch._dynamo.eval_frame._stance, _Stance):
        torch._dynamo.eval_frame._stance = _Stance(stance)  # type: ignore[assignment]  # it answers alike
    give_zeros_memory()


def expect_hooks_of_all_modules() -> None:
    """Suppress the warning of compiled modules about global hooks, which are made for them."""
    entry = ("ignore", re.compile(r"Using `torch\.compile\(module\)` when there are global hooks", re.I), UserWarning)
    if not any(each[:3] == entry for each in warnings.filters):
        warnings.filterwarnings("ignore", entry[1].pattern, UserWarning)


def give_zeros_memory() -> None:
    """Make inductor, if loaded, allocate zeros that torch keeps without memory, because its kernels read them."""
    # Forward mode makes such zeros, also as a constant's tangent, and the process crashed (pytorch issue 177261).
    if "torch._inductor.lowering" in sys.modules and zeros_without_memory not in _written_out:
        from torch._inductor.lowering import lowerings, tensor_constructor

        lowerings[zeros_without_memory] = tensor_constructor(0)
        _written_out.add(zeros_without_memory)


# Position in dynamo's code at which this thread last read the stance, with the answer.
_answers = threading.local()


class _Stance:
    """The stance of `torch.compiler.set_stance`, which all threads share, with the callbacks of the calling thread.

    Args:
        given: The user's stance.
    """

    def __init__(self, given: Any):
        self._given = given

    def __getattr__(self, name: str) -> Any:
        return getattr(self._given, name)

    @property
    def stance(self) -> str:
        """The stance that dynamo reads at each call of compiled code."""
        # One call reads it several times, and callbacks may change their answer in between, as objects are collected.
        reader = sys._getframe(1)
        asks: Any = torch._dynamo.eval_frame._callback_from_stance
        before, answer = getattr(_answers, "last", (sys.maxsize, ""))
        if reader.f_code is not asks.__code__ or reader.f_lasti <= before:
            answer = "force_eager" if _runs_uncompiled() else self._given.stance
        _answers.last = (reader.f_lasti, answer)
        return answer


def _runs_uncompiled() -> bool:
    # Torch compiles its own operators that take functions, and loses gradients otherwise.
    if torch._dynamo.config.allow_empty_graphs:
        return False
    # A function that is called while another graph is compiled cannot be compiled itself.
    if torch._guards.TracingContext.try_get() is not None:
        return True
    said = _said.get()
    return not said if said is not None else any(asked() for asked in _askers)


def compiled_call() -> tuple[Any, Any, Any] | None:
    """Return the compiled function that is being called, its arguments and keywords; None if unknown."""
    frame: FrameType | None = sys._getframe(1)
    asks: Any = torch._dynamo.eval_frame._callback_from_stance
    file = asks.__code__.co_filename
    while frame is not None and frame.f_code.co_filename != file:
        frame = frame.f_back
    while frame is not None and frame.f_code.co_filename == file:
        held = frame.f_locals
        # From Python 3.13 on, the keys of frames' locals are not a set.
        if {"fn", "args", "kwargs"} <= set(held):
            return held["fn"], held["args"], held["kwargs"]
        frame = frame.f_back
    return None


def hide_from_dynamo(function: Callable[..., Any], reason: str | None = None) -> None:
    """Mark a function so that dynamo does not trace it, and says why where it must."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = reason  # type: ignore[attr-defined] # dynamo reads it from any function


def as_one_node(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function as a single node of a compiled graph, through which torch differentiates as in eager code."""
    import torch._dynamo

    watch_compiled_code()
    return torch._dynamo.nonstrict_trace(function)


def without_compilation(function: Callable[..., Any]) -> Callable[..., Any]:
    """Remove attributes of compiled code copied by `functools.wraps`, by which dynamo would skip the wrapper."""
    for name in _OF_COMPILED_CODE & vars(function).keys():
        delattr(function, name)
    return function


def at_trace_time(function: F) -> F:
    """Mark a function to run when dynamo traces it; its result is a constant of the graph."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]  # mypy knows no attributes of functions
    return function


def show_to_modes(functions: Collection[Callable[..., Any]]) -> None:
    """Show functions to function modes while dynamo traces, as in eager code; dynamo shows only public ones."""
    # Dynamo reads torch's list when it first traces. These functions do call modes, so they belong into it.
    get_overridable_functions()[torch].extend(functions)
    if is_dynamo_loaded():
        from torch._dynamo.variables.torch import get_overridable_functions as read_by_dynamo

        read_by_dynamo().update(functions)


def answer_as_tensors(kind: type) -> None:
    """Let objects of a class pass as tensors for `isinstance`, `type`, `match` and `torch.is_tensor` in dynamo."""
    from torch._dynamo.variables.base import VariableTracker
    from torch._dynamo.variables.builtin import BuiltinVariable
    from torch._dynamo.variables.constant import ConstantVariable
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
    from torch._dynamo.variables.user_defined import UserDefinedObjectVariable

    builtins: Any = BuiltinVariable
    if hasattr(builtins.call_isinstance, "__wrapped__"):
        return

    def is_of_kind(arg: Any) -> bool:
        return isinstance(arg, UserDefinedObjectVariable) and issubclass(arg.python_type(), kind)

    # In torch's and hodiff's own code, `type` must return the actual class.
    own = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]))
    of_builtins, type_of_builtins = builtins.call_isinstance, builtins.call_type

    @functools.wraps(of_builtins)
    def call_isinstance(self: Any, tx: Any, arg: Any, isinstance_type_var: Any) -> Any:
        if is_of_kind(arg) and issubclass(torch.Tensor, isinstance_type_var.as_python_constant()):
            return ConstantVariable.create(True)
        return of_builtins(self, tx, arg, isinstance_type_var)

    @functools.wraps(type_of_builtins)
    def call_type(self: Any, tx: Any, obj: Any) -> Any:
        asked_elsewhere = not tx.f_code.co_filename.startswith(own)
        if asked_elsewhere and is_of_kind(obj):
            return VariableTracker.build(tx, torch.Tensor)
        return type_of_builtins(self, tx, obj)

    handlers: Any = TorchInGraphFunctionVariable._get_handlers()
    is_tensor = handlers[torch.is_tensor]

    def call_is_tensor(self: Any, tx: Any, arg: Any) -> Any:
        return ConstantVariable.create(True) if is_of_kind(arg) else is_tensor(self, tx, arg)

    builtins.call_isinstance, builtins.call_type = call_isinstance, call_type
    handlers[torch.is_tensor] = call_is_tensor
    builtins.call_function_handler_cache.clear()
