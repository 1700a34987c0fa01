"""What the nodes of an autograd graph know about themselves."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torch._functorch import autograd_function
from torch._ops import OpOverload
from torch.autograd import Function
from torch.autograd.function import BackwardCFunction
from torch.nn.modules import _functions

# The identity by which a module calls its backward hooks.
BackwardHookFunction = _functions.BackwardHookFunction
# How torch calls the node of a `torch::autograd::Function`, whose class stands in angle brackets.
_CPP_FUNCTION = "CppNode<"
# The frames in which a `torch.autograd.Function` is called, whose local `cls` it is; in 2.15 `apply` is C++.
_CALLS = {"apply", "_call_custom_function_call"}


def results_of(node: Any) -> tuple[Any, ...]:
    """Shape, dtype and device of each result that a node pulls back from; none for a context that is no node."""
    results: tuple[Any, ...] = getattr(node, "_input_metadata", ())
    return results


def sequence_number(node: Any) -> int:
    """Return a number that grows with each operator that a thread records."""
    number: int = node._sequence_nr()
    return number


def function_of(node: Any) -> Any:
    """The class of the `torch.autograd.Function` that made a node; None for an operator's."""
    return getattr(node, "_forward_cls", None)


def function_name(node: Any) -> str:
    """The name of the `torch.autograd.Function` that made a node, under transforms, too."""
    name: str = node.name().removesuffix("Backward").removesuffix("Generated")
    return name


def backward_rules(function: Any) -> Iterator[Any]:
    """The rules of a Function for reverse mode, and those that the rules of one that torch made close over."""
    for rule in (getattr(function, name, None) for name in ("backward", "vjp")):
        if rule is None or rule in (Function.backward, Function.vjp):
            continue
        yield rule
        # Under a torch.func transform the node belongs to a class made for one level, which closes over the user's
        # class, and that of an operator of torch.library over its formula.
        for value in _closed_over(rule):
            if isinstance(value, type) and issubclass(value, Function) and value is not function:
                yield from backward_rules(value)
            elif (formula := getattr(value, "_backward_fn", None)) is not None:
                yield formula


def written_function(function: Any) -> Any:
    """The Function that somebody wrote, of one that torch.func made of it for a level of its transforms."""
    while getattr(function, "__module__", None) == autograd_function.__name__:
        # One that vmap makes closes over itself, too.
        types = (each for each in _closed_over(function.backward) if isinstance(each, type) and each is not function)
        made_of = next((each for each in types if issubclass(each, Function)), None)
        if made_of is None:
            break
        function = made_of
    return function


@contextmanager
def watching_operands(keep: Callable[[Any, tuple[Any, ...]], None]) -> Iterator[None]:
    """See what Functions that are written in Python are called with inside, in this thread.

    Args:
        keep: Called with the node of each Function, which is the context of forward or setup_context, and with the
            arguments; never if a profiler is active.
    """
    seen: set[Any] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_argcount:
            return
        given = frame.f_locals
        node, *rest = (given.get(name) for name in code.co_varnames[: code.co_argcount])
        if not isinstance(node, BackwardCFunction) or node in seen:
            return
        if any(code is getattr(rule, "__code__", None) for rule in backward_rules(function_of(node))):
            return
        if code.co_flags & inspect.CO_VARARGS:
            rest += given[code.co_varnames[code.co_argcount + code.co_kwonlyargcount]]
        apart = function_of(node).setup_context is not Function.setup_context
        found = tuple(rest[0]) if apart and rest and isinstance(rest[0], tuple) else tuple(rest)
        # Parameters with defaults are not among the inputs of the node.
        if len(found) >= (count := len(node.needs_input_grad)):
            seen.add(node)
            keep(node, found[:count])

    outside = sys.getprofile()
    if outside is not None and getattr(outside, "__code__", None) is not note.__code__:
        yield
        return
    sys.setprofile(note)
    try:
        yield
    finally:
        # A profiler that was set inside stays.
        if sys.getprofile() is note:
            sys.setprofile(outside)


def called_functions(frames: Iterable[FrameType]) -> Iterator[Any]:
    """Yield the Functions that are called in some frames, by `apply` or by their own forward."""
    stack: list[Any] = [Function]
    forwards = {}
    while stack:
        function = stack.pop()
        stack += function.__subclasses__()
        forward: Any = getattr(vars(function).get("forward"), "__func__", None)
        forwards[getattr(inspect.unwrap(forward), "__code__", None)] = function
    for frame in frames:
        called = frame.f_locals.get("cls") if frame.f_code.co_name in _CALLS else forwards.get(frame.f_code)
        if isinstance(called, type) and issubclass(called, Function):
            yield called


def operator_of(function: Any) -> str:
    """The name of the operator of torch.library that a Function was made for; empty for others."""
    values = _closed_over(getattr(function, "backward", None))
    return next((each.name().removesuffix(".default") for each in values if isinstance(each, OpOverload)), "")


def _closed_over(rule: Any) -> Iterator[Any]:
    if not inspect.isfunction(rule):
        return
    for name, value in inspect.getclosurevars(rule).nonlocals.items():
        yield value
        if name == "orig_backward":  # of an operator that takes lists of tensors
            yield from _closed_over(value)


def described_backward(node: Any) -> str:
    """The name of the backward that a Function's node runs, and where it is written."""
    if is_cpp_function(node):
        return f"{node.name().partition(_CPP_FUNCTION)[2].removesuffix('>')}::backward, in C++,"
    name = operator_of(function_of(node)) or function_name(node)
    call = getattr(node, "call", None)  # of hodiff.custom_vjp and its like
    owner = getattr(call, "owner", None)
    rules = [
        getattr(owner, "backward", None),
        getattr(owner, "rule", None),
        *list(backward_rules(function_of(node)))[::-1],
    ]
    return f"{getattr(call, 'name', name)}.backward{place_of(*rules)}"


def place_of(*rules: Any) -> str:
    """The file and line of the first of some functions that is written in Python, in brackets; empty for none."""
    code = next((inspect.unwrap(rule).__code__ for rule in rules if hasattr(rule, "__code__")), None)
    return "" if code is None else f" ({os.path.basename(code.co_filename)}:{code.co_firstlineno})"


def is_of_higher_order_operator(function: type) -> bool:
    """Whether a Function is torch's for an operator that takes functions, such as `torch.cond`."""
    return function.__module__.startswith("torch._higher_order_ops")


def is_of_many_kinds(node: Any) -> bool:
    """Whether the type of a node does not say what it stands for: one of C++ that Python has no class for."""
    return type(node).__name__ == "CppFunction"


def is_cpp_function(node: Any) -> bool:
    """Whether a `torch::autograd::Function` of an extension in C++ made a node."""
    return is_of_many_kinds(node) and _CPP_FUNCTION in node.name()


def lacks_kernel(node: Any) -> bool:
    """Whether a node stands for an operator without an autograd kernel: torch warns, and takes zeros."""
    return is_of_many_kinds(node) and node.name() == "torch::autograd::WarnNotImplemented"


def raises_when_run(node: Any) -> bool:
    """Whether a node stands for a derivative that torch does not have."""
    return node.name() in {"torch::autograd::Error", "torch::autograd::NotImplemented"}


def saved_by_operator(node: Any) -> list[tuple[str, Any]]:
    """What an operator's node keeps for backward, by name."""
    return [(name.removeprefix("_saved_"), getattr(node, name)) for name in dir(node) if name.startswith("_saved_")]


def saved_index(value: int) -> int:
    """An index that an operator's node keeps: torch shows negative ones as unsigned."""
    return value - 2**64 if value >= 2**63 else value
