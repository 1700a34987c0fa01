"""Dispatch of torch functions that are called with jets."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from hodiff.common.trees import overrides_functions
from hodiff.corrections import Corrections
from hodiff.errors import InputError
from hodiff.taylor.fallback import unknown
from hodiff.taylor.jet_views import assign, watched
from hodiff.taylor.jets import Jet, TensorJet, is_plain_tensor, jets_in, new_jet, tensor_of
from hodiff.taylor.jets_in_arguments import at_the_moment, call, value_of
from hodiff.taylor.registry import RULES, Entry, entry_of, in_rules_form, name_of
from hodiff.taylor.running import JetMet, is_constant_here, is_running, must_not_be_met
from hodiff.taylor.series import Frame
from hodiff.taylor.sparsity import by_slots
from hodiff.taylor.steps_of_lengths import PIECEWISE, along_each_side
from hodiff.torch_internals.autograd.grad_mode import function_calls, inside_of_function
from hodiff.torch_internals.autograd.transforms import in_transform
from hodiff.torch_internals.autograd.wrapped_tensors import without_ended_wrappers
from hodiff.torch_internals.interception import (
    apply_in_transform,
    function_mode_count,
    in_function_modes,
    without_function_modes,
)
from hodiff.torch_operators.operator import IN_PLACE_OPERATORS, Kind
from hodiff.torch_operators.table import functions_named, functions_of_kind

# In-place functions that change the shape of a tensor; its views would keep the old shape.
_OTHER_SHAPES = frozenset({
    *("squeeze_", "unsqueeze_", "t_", "transpose_", "swapaxes_", "swapdims_", "as_strided_", "resize_", "resize_as_"),
})


class FunctionMet(BaseException):
    """Raised when an operator runs in the forward of a Function, which bypasses the Function's own rule."""


class Accumulators(TorchFunctionMode):
    """Turn constants that a function creates into jets, so that jets can be written to them."""

    def __init__(self, frame: Frame):
        super().__init__()
        self.frame = frame

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function, and return a floating-point or complex constant that it creates as a jet."""
        made = func(*args, **(kwargs or {}))
        if func not in _FACTORIES or not is_plain_tensor(made):
            return made
        if not (made.is_floating_point() or made.is_complex()):
            return made
        return new_jet(self.frame, [made, *[None] * self.frame.order])


_FACTORIES = frozenset(
    function
    for name in ("zeros", "ones", "empty", "full", "clone")
    for each in (name, f"{name}_like", f"new_{name}")
    for function in functions_named(each)
)


def function_calls_around() -> int:
    """Number of calls of Functions around a pass that begins now; 0 if it begins outside of their rules."""
    return function_calls() if inside_of_function() else 0


def handle(jets: list[Jet], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a function's rule in the deepest frame of its jets; jets of other frames are constants."""
    frame = jets[0].frame
    for jet in jets:
        if jet.frame.ended:
            return _of_an_ended_pass(func, args, kwargs)
        if jet.frame.depth > frame.depth:
            frame = jet.frame
    if not torch.compiler.is_compiling():
        args, kwargs = _in_python(args), {name: _in_python(each) for name, each in kwargs.items()}
    if frame.moment is not None:
        return _at_the_moment(func, args, kwargs)
    # Tensors that rules create stay constants.
    with without_function_modes(Accumulators) if frame.accumulates else nullcontext():
        compiling = torch.compiler.is_compiling()
        if not compiling and must_not_be_met(frame):
            raise JetMet(frame)
        # The forward of a Function may switch derivatives off; the Function's own rules provide them.
        if not compiling and inside_of_function() and _in_a_function_of(frame, func):
            raise FunctionMet
        if is_constant_here(frame) and func is not torch.Tensor.requires_grad_:
            return _constant(frame, func, args, kwargs)
        differentiated = frame.mode is not None and may_be_differentiated(args, kwargs)
        if not differentiated and (compiling or frame.mode is None or not function_mode_count()):
            return _follow(frame, jets, func, args, kwargs)
        if compiling:
            with frame.mode:
                return _follow(frame, jets, func, args, kwargs)
        # PyTorch disables the mode while it handles a torch function, but not while it handles a Python operator.
        # Without differentiation the mode would only cost time.
        with in_function_modes([frame.mode]) if differentiated else without_function_modes(Corrections):
            return _follow(frame, jets, func, args, kwargs)


def _in_python(value: Any) -> Any:
    """Replace NumPy's scalars, which torch takes for numbers, by Python's, which rules take for numbers."""
    if isinstance(value, np.generic):
        return value.item()
    return type(value)(map(_in_python, value)) if type(value) in (list, tuple) else value


def _in_a_function_of(frame: Frame, func: Any) -> bool:
    """Whether the pass calls a Function whose forward calls `func`, and not only Functions around the pass run."""
    # A Function that asks the jet for its rule is on the stack as well.
    return not frame.functions or function_calls() > frame.functions + (func is apply_in_transform)


def _at_the_moment(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function inside `moment`, with each jet replaced by a point on its curve."""
    name = name_of(func)
    if _writes(name):
        raise InputError(f"jet: {name} writes to a jet that the inner function closes over: expected a new tensor.")
    return call(func, at_the_moment(args), at_the_moment(kwargs))


def _constant(frame: Frame, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function where derivatives are switched off; an in-place target keeps its derivatives, as in torch."""
    name = name_of(func)
    target = args[0] if args else None
    if not _writes(name) or not isinstance(target, Jet):
        return call(func, value_of(frame, args), value_of(frame, kwargs))
    if target.frame is not frame:
        return call(func, args, kwargs)
    value = target.value.clone()
    call(func, (value, *value_of(frame, args[1:])), value_of(frame, kwargs))
    if value.shape != target.value.shape:
        raise InputError(f"jet: {name} changes the shape of a jet in place: expected a new tensor.")
    return assign(target, new_jet(frame, [value, *target.coefficients[1:]]))


def _writes(name: str) -> bool:
    return name in _WRITERS or (name.endswith("_") and not name.endswith("__"))


_WRITERS = IN_PLACE_OPERATORS | {"__setitem__", "__set__"}


def _of_an_ended_pass(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function with jets of an ended pass: outside of all passes they are constants, such as a logged loss."""
    if is_running():
        raise of_an_earlier_call()
    return call(func, *pytree.tree_map_only(Jet, _constant_value, (args, kwargs)))


def _constant_value(jet: Any) -> Any:
    value = tensor_of(jet)
    return without_ended_wrappers(value) if isinstance(value, torch.Tensor) else value


def of_an_earlier_call() -> InputError:
    """Return the error for a jet that was kept from an earlier call."""
    return InputError(
        "jet: a jet of an earlier call was kept, such as in a list or a module, and is used again: "
        "expected values of this call, or x.detach() where it was kept."
    )


def _follow(frame: Frame, jets: list[Jet], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if func is apply_in_transform and args[0] in RULES:
        func, args = args[0], args[1:]
    if kwargs and kwargs.get("out") is not None:
        raise InputError("jet: out=: expected None in Taylor mode; assign the result, or write it by copy_.")
    entry = entry_of(func)
    if entry is None or name_of(func) in _OTHER_SHAPES or _meets_own_functions(jets, args):
        return _without_rule(frame, func, args, kwargs)
    if entry.name in _LIKE_ANOTHER and len(args) > 1:
        args = (args[0], *value_of(frame, args[1:]))
        if not (isinstance(args[0], Jet) and args[0].frame is frame):
            return call(func, args, value_of(frame, kwargs))
    if not entry.analytic and any(jet.is_complex() for jet in jets):
        return _without_rule(frame, func, args, kwargs)
    if kwargs and entry.is_bound:
        args, kwargs = in_rules_form(func, entry.rule, args, kwargs)
    if entry.name in _REDUCING and args:
        args, kwargs = _with_dimensions(frame, entry.name, args, kwargs)
    if entry.plain is not None:
        return _assign(args[0], _by_rule(frame, entry, entry.plain, args, kwargs))
    result = _by_rule(frame, entry, func, args, kwargs)
    if entry.switch is not None and (args[entry.switch : entry.switch + 1] == (True,) or kwargs.get("inplace")):
        return _assign(args[0], result)
    return (
        result
        if entry.name in _IN_OWN_MEMORY or not entry.is_bound
        else watched(entry.name, result, func, args, kwargs)
    )


_REDUCING = {each.name for each in functions_of_kind(Kind.REDUCES)}


def _with_dimensions(frame: Frame, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Name all dimensions where a call names none: torch reduces all then, but none within a vmap over directions."""
    rank = value_of(frame, args[0]).ndim
    without = rank == 0 and name in ("sum", "mean")

    def named(each: Any) -> Any:
        if without and (isinstance(each, (tuple, list)) or type(each) is int):
            return None
        return tuple(range(rank)) if isinstance(each, (tuple, list)) and not each else each

    return (args[0], *map(named, args[1:])), {name: named(each) for name, each in kwargs.items()}


def _meets_own_functions(jets: Sequence[Jet], args: tuple[Any, ...]) -> bool:
    """Whether a tensor subclass takes part whose own version of the function hodiff's rule would leave out."""
    if torch.compiler.is_compiling():
        return False
    return any(
        type(each) not in _OF_TORCH and isinstance(each, torch.Tensor) and overrides_functions(each)
        for values in (args, (jet.held[0] for jet in jets))
        for each in values
    )


_OF_TORCH = (torch.Tensor, torch.nn.Parameter, float, int, bool, TensorJet)

# Functions that use only the dtype, device or shape of their second argument.
_LIKE_ANOTHER = frozenset({"to", "type_as", "view_as", "expand_as", "reshape_as"})

# Frequently called functions whose result never shares memory with an argument.
_IN_OWN_MEMORY = frozenset({
    *("add", "sub", "mul", "div", "matmul", "nn.linear", "sum", "mean", "exp", "log", "sin", "cos", "tanh", "sigmoid"),
    *("nn.silu", "nn.gelu", "nn.softplus", "relu", "sqrt", "square"),
})


def _by_rule(frame: Frame, entry: Entry, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    is_kinked = frame.kink.is_met and any(jet.is_kinked for jet in jets_in((args, kwargs)))
    if is_kinked and entry.name in PIECEWISE:
        result = along_each_side(frame, partial(_apply, frame, entry), func, args, kwargs)
    else:
        result = _apply(frame, entry, func, args, kwargs)
    if is_kinked or frame.kink.is_new:
        frame.kink.is_new = False
        for jet in jets_in(result):
            jet.is_kinked = True
    return result


def _assign(target: Any, result: Any) -> Any:
    """Write a result to a jet in place."""
    written = assign(target, result)
    written.is_kinked = written.is_kinked or (isinstance(result, Jet) and result.is_kinked)
    return written


def _apply(frame: Frame, entry: Entry, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    found = by_slots(frame, entry, func, args, kwargs) if frame.sparse else NotImplemented
    return entry.rule(frame, func, *args, **kwargs) if found is NotImplemented else found


def _without_rule(frame: Frame, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Fall back to nested forward mode; in-place variants use their out-of-place function."""
    name = name_of(func)
    if not name.endswith("_") or name.endswith("__"):
        jets = [jet for jet in jets_in((args, kwargs)) if jet.frame is frame]
        takes_functions = any(map(callable, (*args, *kwargs.values())))
        if not takes_functions and all(each is None for jet in jets for each in jet.in_slots()[1:]):
            return call(func, value_of(frame, args), value_of(frame, kwargs))
        return unknown(frame, func, args, kwargs)
    plain = getattr(torch.Tensor, name[:-1], None)
    if plain is None or name in _OTHER_SHAPES:
        raise InputError(
            f"jet: {name} writes in place, which is not supported for a jet: expected a function that returns a "
            "new tensor, such as x.unsqueeze(0) in place of x.unsqueeze_(0)."
        )
    return assign(args[0], unknown(frame, plain, args, kwargs))


def may_be_differentiated(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether derivatives of a rule's result may be requested from outside."""
    if in_transform():
        return True
    return torch.is_grad_enabled() and _requires_grad((args, kwargs))


def _requires_grad(tree: Any) -> bool:
    if isinstance(tree, torch.Tensor):
        return tree.requires_grad
    if isinstance(tree, Jet):
        return _requires_grad(tree.in_slots())
    if not isinstance(tree, (list, tuple, dict)):
        return False
    return any(_requires_grad(each) for each in (tree.values() if isinstance(tree, dict) else tree))
