"""What dynamo is told about a function; it is not loaded before something is compiled."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch


def is_dynamo_loaded() -> bool:
    """Whether dynamo has been imported, without which nothing can be traced."""
    return "torch._dynamo" in sys.modules


def is_compiled(value: Any) -> bool:
    """Whether a module or function is what torch.compile made of one."""
    if not is_dynamo_loaded():
        return False
    return isinstance(value, torch._dynamo.OptimizedModule) or hasattr(value, "_torchdynamo_orig_callable")


def hide_from_dynamo(function: Callable[..., Any]) -> None:
    """Mark a function as one that dynamo does not look into."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]


def as_one_node(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as one node of a compiled graph, through which torch differentiates as in eager code."""
    import torch._dynamo

    return torch._dynamo.nonstrict_trace(function)


def at_trace_time(function: Callable[[], None]) -> Callable[[], None]:
    """Mark a function as one that runs when dynamo meets it, and leaves nothing in the graph."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]  # mypy knows no attributes of functions
    return function


def show_to_modes(functions: Iterable[Callable[..., Any]]) -> None:
    """Let function modes see these while dynamo traces, as they do else; it shows them public ones alone."""
    from torch._dynamo.variables.torch import get_overridable_functions

    get_overridable_functions().update(functions)


def answer_as_tensors(kind: type) -> None:
    """Let objects of a class be tensors to `isinstance`, `type`, `match` and `torch.is_tensor` while dynamo traces."""
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

    # What of torch and hodiff asks for the type wants the class that answers torch's functions.
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
