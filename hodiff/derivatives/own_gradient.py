"""Warnings, once for each function, that its gradient is not its derivative or that its dtype has few digits."""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hodiff.common.module_state import untouched
from hodiff.common.randomness import RandomState
from hodiff.derivatives.capture.refusals import line_now
from hodiff.errors import HodiffWarning, levels_to_the_caller
from hodiff.graphs import nodes_of
from hodiff.recompute.reachable import named_modules
from hodiff.torch_internals.autograd.grad_mode import in_forward_mode, in_fx_trace, tangents_are_on
from hodiff.torch_internals.autograd.graph_nodes import BackwardHookFunction, function_of
from hodiff.torch_internals.autograd.wrapped_tensors import is_wrapped

# Smaller relative differences may be rounding or a nearby kink.
_CLEAR = 0.02
# Step of the finite differences, relative to the size of each tensor.
_STEP = 2e-2

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


class _Thread(threading.local):
    comparing = False
    limits: tuple[Tensor, Tensor] | None = None


_this_thread = _Thread()


@contextmanager
def compared_within(lower: Tensor, upper: Tensor) -> Iterator[None]:
    """Keep the differences of functions of n numbers, in one or several leaves, within limits (n,)."""
    before, _this_thread.limits = _this_thread.limits, (lower, upper)
    try:
        yield
    finally:
        _this_thread.limits = before


def is_comparing() -> bool:
    """Whether a function runs only for the finite differences of a warning."""
    return _this_thread.comparing


class Watch:
    """Finds the first call that takes a differentiated tensor out of the graph.

    Attributes:
        cut: The line of the call, or "".
    """

    def __init__(self) -> None:
        self.cut = ""

    def __call__(self, func: Any, args: Any) -> None:
        """Record the line of a call that leaves the graph."""
        cuts = (
            func in _CUTS
            or (func in _COLLECTS and not any(isinstance(each, Tensor) for each in args[:1]))
            or (func in _VIEWS and (len(args) == 1 or isinstance(args[1], torch.dtype)))
        )
        # Skip calls inside a Function, where tangents are off.
        inside = not (tangents_are_on() or torch.is_inference_mode_enabled())
        if self.cut or inside or not (cuts or not torch.is_grad_enabled()):
            return
        if (cuts or func.__name__ not in _READS) and any(
            isinstance(each, Tensor) and each.requires_grad for each in pytree.tree_leaves(args)
        ):
            self.cut = line_now()


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
    _this_thread.comparing = True
    try:
        with untouched(list(named_modules(f))), RandomState(leaves).replayed():
            try:
                told = _compare(evaluate, leaves)
            finally:
                # Restore the state that the function keeps for its backward to the point's; hooks are not restored.
                evaluate([leaf.detach().requires_grad_() for leaf in leaves])
    except Exception:
        # The function may accept only one kind of call, or only one call.
        return
    finally:
        _this_thread.comparing = False
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


def _compare(evaluate: Callable[[Sequence[Tensor]], Any], leaves: Sequence[Tensor]) -> tuple[float, float] | None:
    """Return the derivative along a direction by autograd and by differences, or None if they agree or are unclear."""
    generator = torch.Generator().manual_seed(0)
    points = [leaf.detach().requires_grad_() for leaf in leaves]
    limits = _limits_of(points)
    moves = [_direction(leaf, generator) for leaf in points]
    for i, (point, (lower, upper)) in enumerate(zip(points, limits, strict=False)):
        room = torch.minimum(point - lower, upper - point).detach().clamp(min=0) / _STEP
        moves[i] = torch.minimum(torch.maximum(moves[i], -room), room)
    weights: list[Tensor] = []

    def number(at: Sequence[Tensor]) -> Tensor:
        torch.manual_seed(0)
        outputs = [each for each in pytree.tree_leaves(evaluate(at)) if _is_floating(each)]
        if not weights:
            weights.extend(
                torch.randn(each.shape, generator=generator, device=generator.device).to(each) for each in outputs
            )
        return torch.stack([(w * y).double().sum() for w, y in zip(weights, outputs, strict=True)]).sum()

    def moved(h: float) -> list[Tensor]:
        at = [p + h * m for p, m in zip(points, moves, strict=True)]
        # A rounded sum may exceed a limit.
        return (
            [torch.minimum(torch.maximum(p, low), up) for p, (low, up) in zip(at, limits, strict=True)]
            if limits
            else at
        )

    with torch.enable_grad():
        value = number(points)
        gradient = torch.autograd.grad(value, points, allow_unused=True)
    own = sum(float((g.double() * m.double()).sum()) for g, m in zip(gradient, moves, strict=True) if g is not None)
    # The function may register hooks, which need a recorded graph.
    with torch.enable_grad():
        # A function that depends on its history, or draws from another generator, has no differences.
        if float(number(points).detach()) != float(value.detach()):
            return None
        wide, narrow = (
            float(number(moved(h)).detach()) - float(number(moved(-h)).detach()) for h in (_STEP, _STEP / 2)
        )
    wide, narrow = wide / (2 * _STEP), narrow / _STEP
    truth = (4 * narrow - wide) / 3
    eps = max(torch.finfo(each.dtype).eps for each in points)
    doubt = 4 * abs(narrow - wide) + 100 * eps * abs(float(value.detach())) / _STEP
    return (own, truth) if abs(own - truth) > doubt + _CLEAR * max(abs(own), abs(truth)) else None


def _limits_of(points: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Return the limits of each leaf; none if there are no limits of as many numbers."""
    sizes = [each.numel() for each in points]
    if _this_thread.limits is None or sum(sizes) != _this_thread.limits[0].numel():
        return []
    lower, upper = (side.split(sizes) for side in _this_thread.limits)
    return [
        (low.reshape(each.shape).to(each), up.reshape(each.shape).to(each))
        for each, low, up in zip(points, lower, upper, strict=True)
    ]


def _direction(leaf: Tensor, generator: torch.Generator) -> Tensor:
    size = float(leaf.detach().double().square().mean().sqrt()) if leaf.numel() else 0.0
    return torch.randn(leaf.shape, generator=generator, device=generator.device).to(leaf) * (size or 1.0)


def _is_floating(each: Any) -> bool:
    return isinstance(each, Tensor) and each.is_floating_point()
