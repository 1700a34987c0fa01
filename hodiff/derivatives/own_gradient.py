"""Warnings, once for each function, that its gradient is not its derivative or that its dtype has few digits."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary

from hodiff.common.module_state import untouched
from hodiff.common.randomness import RandomState
from hodiff.common.trees import tensors_in
from hodiff.derivatives.capture.refusals import line_now
from hodiff.derivatives.gradient_comparison import compare, comparing
from hodiff.errors import HodiffWarning, levels_to_the_caller
from hodiff.graphs import nodes_of
from hodiff.recompute.reachable import named_modules
from hodiff.torch_internals.autograd.grad_mode import in_forward_mode, in_fx_trace, tangents_are_on
from hodiff.torch_internals.autograd.graph_nodes import BackwardHookFunction, function_of
from hodiff.torch_internals.autograd.wrapped_tensors import is_wrapped

# Calls that take a tensor out of the graph.
_DATA: Any = Tensor.data
_CUTS = {Tensor.detach, Tensor.detach_, torch.detach, Tensor.numpy, Tensor.item, Tensor.tolist, _DATA.__get__}
_CUTS |= {Tensor.__float__, Tensor.__int__, torch.tensor, Tensor.new_tensor}
_aten: Any = torch.ops.aten
_CUTS |= {_aten.detach, _aten.detach.default, _aten.view.dtype, Tensor.untyped_storage}
# A hook may change the gradient.
_CUTS |= {Tensor.register_hook}
# Calls that do so unless their first argument is a tensor.
_COLLECTS = {torch.as_tensor, torch.asarray}
# Calls that do so if they are given a dtype.
_VIEWS = {Tensor.view, _aten.view}
# Calls that read no numbers of a tensor, or pass it on.
_READS = {"__get__", "__set__", "size", "dim", "numel", "stride", "requires_grad_", "is_floating_point"}

_asked: set[int] = set()


class Watch:
    """Finds the first call that takes a differentiated tensor out of the graph."""

    def __init__(self) -> None:
        # Lines of cuts whose numbers enter the graph again, of those whose numbers leave torch, and of all cuts.
        self._used = self._read = self._any = ""
        # Floating-point tensors outside of the graph that depend on differentiated ones, and the line of the cut.
        # Indices and masks, as of a neighbour list, have no derivative that is lost.
        self._lost = WeakTensorKeyDictionary()

    @property
    def cut(self) -> str:
        """The line of the call, or ""."""
        return self._used or self._read or self._any

    def __call__(self, func: Any, arguments: tuple[Any, Any]) -> Callable[[Any], None] | None:
        """Record the line where a cut is made or used; return what to do with the result, if anything."""
        # Skip calls inside a Function, where tangents are off.
        if self._used or not (tangents_are_on() or torch.is_inference_mode_enabled()):
            return None
        args, kwargs = arguments
        tensors = tensors_in(arguments)
        # The call may detach its argument.
        recorded = any(each.requires_grad for each in tensors)
        cuts = (
            func in _CUTS
            or (func in _COLLECTS and not any(isinstance(each, Tensor) for each in args[:1]))
            or (func in _VIEWS and (len(args) == 1 or isinstance(args[1], torch.dtype)))
            or (func is torch.autograd.grad and not kwargs.get("create_graph"))
        )
        line = next((self._lost[each] for each in tensors if each in self._lost), "")
        used = bool(line) and recorded and torch.is_grad_enabled()
        if recorded and (cuts or not torch.is_grad_enabled()):
            line = line_now()
            if cuts or func.__name__ not in _READS:
                self._any = self._any or line
        if not line:
            return None
        written = args[:1] if func is Tensor.__setitem__ else None
        return lambda result: self._note(line, cuts, used, tensors_in(result if written is None else written))

    def _note(self, line: str, cuts: bool, used: bool, results: Sequence[Tensor]) -> None:
        numbers = [each for each in results if each.is_floating_point() or each.is_complex()]
        for each in numbers:
            if not each.requires_grad:
                self._lost[each] = line
        if not results and cuts:
            self._read = self._read or line
        if used and any(each.requires_grad for each in numbers):
            self._used = line


def is_asked(f: Callable[..., Any]) -> bool:
    """Whether a function with this code, which closes over modules and functions like these, was examined already."""
    return _key(f) in _asked


def _key(f: Callable[..., Any]) -> int:
    if not getattr(f, "__closure__", None) and type(f) is FunctionType:
        return _hash_of(f.__code__)
    return hash(_kind_of(f, _DEPTH))


def _hash_of(code: CodeType) -> int:
    try:
        return hash(code)
    except TypeError:  # code that dynamo writes may have a dict among its constants
        return hash((code.co_filename, code.co_firstlineno, code.co_code))


# Levels of functions within closures that tell one function from another with the same code.
_DEPTH = 3
# Callables without code of their own, which are what they are.
_NAMED = (BuiltinFunctionType, type)


def _kind_of(value: Any, depth: int) -> Any:
    """Return what tells a function, and what it calls, from others; None for values that call nothing."""
    if isinstance(value, torch.nn.Module):
        return type(value)
    if isinstance(value, partial):
        return _kind_of(value.func, depth), *(_kind_of(each, depth - 1) for each in value.args if depth)
    if isinstance(value, MethodType):
        return _kind_of(value.__func__, depth), _kind_of(value.__self__, 0)
    if not callable(value):
        return None
    cells = getattr(value, "__closure__", None) if depth else None
    held = (_kind_of(_contents(cell), depth - 1) for cell in cells or ())
    code = getattr(value, "__code__", None)
    named = value if isinstance(value, _NAMED) else type(value)
    return (_hash_of(code) if isinstance(code, CodeType) else named), *held


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None


def warn_once(
    caller: str,
    f: Callable[..., Any],
    evaluate: Callable[[Sequence[Tensor]], Any],
    leaves: Sequence[Tensor],
    result: Any,
    cut: str,
) -> None:
    """Warn of 16-bit numbers, and of a function that leaves the graph if finite differences disagree with its gradient.

    Args:
        caller: The public function, for the message.
        f: The user's function.
        evaluate: Computes the function's result at other leaves.
        leaves: The point.
        result: The function's result at the point.
        cut: The line where the function left the graph, if a `Watch` recorded one.
    """
    if in_fx_trace() or any(map(is_wrapped, leaves)):
        return
    _asked.add(_key(f))
    for dtype in {leaf.dtype for leaf in leaves if leaf.dtype.itemsize == 2}:
        digits = round(-math.log10(torch.finfo(dtype).eps))
        warnings.warn(
            f"{caller}: {dtype} has about {digits} digits, and second derivatives have fewer: for models, their "
            "errors are 0.5 to 5 %. If that matters, convert parameters and inputs by .float().",
            HodiffWarning,
            stacklevel=levels_to_the_caller(),
        )
    found = next(_custom_functions(result), None)
    if found is not None and (not cut or found is not BackwardHookFunction):
        # A Function without setup_context calls its forward without recording.
        is_hook = found is BackwardHookFunction
        name = "a backward hook of a module" if is_hook else f"{found.__name__}, a custom Function"
        cut = f"{name}, or {cut}" if cut else name
    if not cut or in_forward_mode():
        return
    try:
        with comparing(), untouched(list(named_modules(f))), RandomState(leaves).replayed():
            try:
                told = compare(evaluate, leaves)
            finally:
                # Restore the state that the function keeps for its backward to the point's; hooks are not restored.
                evaluate([leaf.detach().requires_grad_() for leaf in leaves])
    except Exception:
        # The function may accept only one kind of call, or only one call.
        return
    if told is not None:
        warnings.warn(
            f"{caller}: the gradient by autograd is not the derivative of the function: along a random direction the "
            f"gradient is {told[0]:.3g}, and differences of values give {told[1]:.3g}. The cause is {cut}, which "
            "leaves the graph. hodiff differentiates that gradient. If this is not intended, differentiate only with "
            "respect to parameters that require a gradient, and call hodiff.preflight or hodiff.check.",
            HodiffWarning,
            stacklevel=levels_to_the_caller(),
        )


def _custom_functions(result: Any) -> Iterator[type]:
    for output in pytree.tree_leaves(result):
        for node in nodes_of(output) if isinstance(output, Tensor) else ():
            function = function_of(node)
            own = function is None or function.__module__.startswith(("hodiff.", "torch."))
            if not own or function is BackwardHookFunction:
                yield function
