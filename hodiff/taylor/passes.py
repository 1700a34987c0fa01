"""One pass of a function over jets.

Support for hodiff functions that take functions, where these functions close over jets.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from traceback import walk_tb
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hodiff.common.module_state import at_another_point
from hodiff.common.randomness import RandomState, is_generator
from hodiff.common.running_pass import running
from hodiff.common.trees import PyTree, flatten, flatten_primals, overrides_functions, unflatten
from hodiff.corrections import Corrections
from hodiff.derivatives.origin import met_nested_tensor, raised_by_user
from hodiff.errors import HodiffError, InputError, RouteError
from hodiff.taylor import jet_calls as calls
from hodiff.taylor import rules as rules
from hodiff.taylor import transforms as transforms
from hodiff.taylor.fallback import closed_over_by_forward, moment, unknown
from hodiff.taylor.jet_views import ConstantWritten
from hodiff.taylor.jets import Jet, is_plain_tensor, jets_in, tensor_of
from hodiff.taylor.plain_tensors import compare, comparison_due, surroundings
from hodiff.taylor.registry import RULES, keep_methods
from hodiff.taylor.running import (
    JetMet,
    as_constant,
    frames,
    is_constant_here,
    knowing_no_jets,
    switch,
    under_way,
)
from hodiff.taylor.series import Coefficient, Frame
from hodiff.torch_internals.autograd.graph_nodes import called_functions
from hodiff.torch_internals.autograd.wrapped_tensors import unwrap_if_ended
from hodiff.torch_internals.compilers.dynamo import TuplesAsLists, answer_as_tensors, at_trace_time, in_one_graph
from hodiff.torch_internals.interception import functions_offered
from hodiff.torch_internals.wording import Wording, says


class TaylorPass:
    """The running pass, as `hodiff.common.running_pass` describes it to lower rooms."""

    def call_closing_over(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function unchanged; fall back to nested forward mode once it meets a jet."""
        if all(frame.moment is not None for frame in frames()):
            return NotImplemented
        constant = [frame for frame in frames() if frame.moment is None and is_constant_here(frame)]
        if constant:
            # Jets stay constant, even if the function enables gradients inside.
            with ExitStack() as held:
                for frame in constant:
                    held.enter_context(moment(frame, as_constant))
                return function(*args, **kwargs)
        entry = RULES.get(function)
        if entry is not None:
            return entry.rule(frames()[-1], function, *args, **kwargs)
        state = RandomState((), filter(is_generator, (*args, *kwargs.values())))
        try:
            with knowing_no_jets():
                return function.__wrapped__(*args, **kwargs)
        except JetMet as met:
            state.rewind()
            frame = met.frame
        return unknown(frame, function, args, kwargs)

    def tensors_alone(self) -> AbstractContextManager[None]:
        """Raise `JetMet` within the context where a jet is used."""
        return knowing_no_jets()

    def switched(self, how: str, block: Any, enabled: bool) -> None:
        """Record whether jets are constant after a switch of gradients."""
        switch(how, block, enabled)


keep_methods()


@contextmanager
def framed(
    order: int,
    directions: int | None = None,
    *,
    collapsed: bool = False,
    correct: bool = True,
    observer: Callable[[Any], None] | None = None,
    sparse: bool = False,
    memory: Any = None,
) -> Iterator[Frame]:
    """Open the frame of a call, nested inside the frames of the calls around it."""
    mode = Corrections() if correct else None
    functions = 0 if torch.compiler.is_compiling() else calls.function_calls_around()
    frame = Frame(
        *(order, directions, collapsed, len(frames()) + 1, calls.handle, mode, observer),
        sparse=sparse,
        memory=memory,
        functions=functions,
    )
    with under_way(frame), nullcontext() if torch.compiler.is_compiling() else running(TaylorPass()):
        yield frame
        frame.ended = True


@at_another_point
def through(
    frame: Frame, f: Callable[..., Any], args: Sequence[Any], *, slots: bool = False
) -> tuple[list[list[Coefficient]], Any]:
    """Run f on jets; return the coefficients of each output leaf, by slots if `slots`, and the output's structure."""
    due = comparison_due(f, args, frame.mode is None)
    tensors = (each for jet in jets_in(list(args)) for each in jet.in_slots() if isinstance(each, Tensor))
    state = RandomState(tensors, foreign=due is not None)
    found, spec = _one_side(frame, f, args, slots, state, due)
    if frame.kink.is_met:
        state.rewind()
        # Functions that are smooth where a length is 0 agree on both sides; other functions use the mean of both sides.
        frame.kink.side = -1
        other, _ = _one_side(frame, f, args, slots, state)
        frame.kink.side, frame.kink.is_met = 1, False
        found = [[a[0], *map(_mean, a[1:], b[1:])] for a, b in zip(found, other, strict=True)]
    return found, spec


def _mean(a: Coefficient, b: Coefficient) -> Coefficient:
    if a is b or (a is None and b is None):
        return a
    return (0 if a is None else a / 2) + (0 if b is None else b / 2)


def _one_side(
    frame: Frame, f: Callable[..., Any], args: Sequence[Any], slots: bool, state: RandomState, due: Any = None
) -> tuple[list[list[Coefficient]], Any]:
    compiling = torch.compiler.is_compiling()
    held = compiling and not torch.is_grad_enabled()
    if held and len(frames()) > 1:
        raise RouteError(
            "jet: inside of another jet call and torch.no_grad(), torch.compile does not show which tensors are "
            "constant: expected the inner call outside of the torch.no_grad() block."
        )
    try:
        outputs, spec = _outputs(frame, f, args, state, held=held)
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        if compiling:
            raise
        if not isinstance(error, RouteError) and not raised_by_user(error) and met_nested_tensor(error):
            raise _takes_no_nested_tensor(error) from error
        named = isinstance(error, RouteError) or str(error).startswith("jet: ")
        if not named and _TENSORS_ALONE.search(str(error)):
            raise _takes_tensors_alone(error) from error
        raise
    found: list[list[Coefficient]] = []
    for each in outputs:
        if isinstance(each, Jet) and each.frame.ended:
            raise calls.of_an_earlier_call()
        moves = isinstance(each, Jet) and each.frame is frame
        constant = each if isinstance(each, (Tensor, Jet)) else _number(each)
        parts = (each.in_slots() if slots else each.coefficients) if moves else (constant, *[None] * frame.order)
        parts = [unwrap_if_ended(part) if is_plain_tensor(part) else part for part in parts]
        found.append([part.detach() if held and isinstance(part, Tensor) else part for part in parts])
    if due is not None and not frame.has_own_rules:
        compare(due, frame, f, args, ([each[0] for each in found], spec), state)
    return found, spec


@at_trace_time
def _jets_as_tensors() -> None:
    answer_as_tensors(Jet)


def _outputs(frame: Frame, f: Callable[..., Any], args: Sequence[Any], state: RandomState, *, held: bool) -> Any:
    """Run f and flatten its output; run it again with other settings if the first run requires them."""
    compiling = torch.compiler.is_compiling()
    if compiling:
        _jets_as_tensors()
    offered = False
    while True:
        try:
            # In a graph, gradients are enabled before f runs, so that disabling them inside of f can be detected.
            with (
                torch.enable_grad() if held else nullcontext(),
                in_one_graph() if compiling else nullcontext(),
                TuplesAsLists() if compiling else nullcontext(),
                functions_offered() if offered else nullcontext(),
                surroundings(frame),
                calls.Accumulators(frame) if frame.accumulates else nullcontext(),
            ):
                return flatten(f(*args))
        except calls.FunctionMet:
            # Operators in the forward of a Function would use their own derivatives, not the Function's. Run f again
            # with Functions intercepted.
            if offered:
                raise closed_over_by_forward() from None
            offered = True
        except ConstantWritten as met:
            # Run f again with jets for the constants that it creates, such as zeros to add to.
            if met.frame.depth != frame.depth or frame.accumulates:
                raise
            frame.accumulates = True
        except JetMet as met:
            if met.frame.depth != frame.depth:
                raise
            raise _takes_tensors_alone(
                TypeError("a linear operator, a solver or a sparse derivative was called with a jet")
            ) from None
        except RuntimeError as error:
            if offered and says(error, Wording.NO_SETUP_CONTEXT):
                raise _without_setup_context(error) from error
            if offered and says(error, Wording.CHANGES_CAPTURED):
                raise RouteError(
                    "jet: f changes a tensor that it closes over in place, and calls an autograd.Function, which "
                    "torch.func does not support together; return the tensor, or use hodiff.hessian or hodiff.jacobian."
                ) from error
            raise
        state.rewind()


def _without_setup_context(error: RuntimeError) -> RouteError:
    called = called_functions(frame for frame, _ in walk_tb(error.__traceback__))
    names = [f"{each.__module__}.{each.__qualname__}" for each in called]
    return RouteError(
        f"jet: {names[-1] if names else 'a Function'}: expected an autograd.Function with setup_context and jvp, got "
        "one whose forward takes ctx, which torch hides from everything that is not a tensor; split its forward and "
        "give it a jvp, register a rule by hodiff.taylor.register, or use hodiff.hessian or hodiff.jacobian."
    )


def _number(each: Any) -> Tensor:
    """Convert a non-tensor output of f to a constant tensor."""
    if isinstance(each, (int, float, complex, np.number)):
        return torch.as_tensor(each)
    raise InputError(
        f"jet: f: expected to return tensors and numbers, in pytrees, got {type(each).__name__} {each!r}; return only "
        "outputs to differentiate."
    )


# Messages that name a jet, or that torch's control flow operators raise for jets.
_TENSORS_ALONE = re.compile(
    r"Jet\b|a jet\b(?! has no attribute)|leaves must be a Tensor|Mapped xs can only consist "
    "of tensors"
)


def _takes_tensors_alone(error: Exception) -> RouteError:
    said = str(error).splitlines()[0]
    return RouteError(
        "jet: a jet is passed to code that supports only tensors, such as torch.nn.Parameter, NumPy, "
        "torch.func.linearize, a linear operator or a check of hodiff, a control flow operator whose name was bound "
        "before hodiff was imported, or code that asks for the type: expected "
        "functions and methods of torch and hodiff, and torch.func's transforms; and for gradients inside also "
        f"torch.autograd.grad(..., create_graph=True). It says: {said}"
    )


def _takes_no_nested_tensor(error: Exception) -> RouteError:
    said = "" if isinstance(error, HodiffError) else f" torch says: {str(error).splitlines()[0]}"
    return RouteError(
        f"jet: Taylor mode does not support nested tensors: use a list of tensors, or a padded tensor and a mask.{said}"
    )


def primal_leaves(tree: PyTree, caller: str, argument: str) -> tuple[list[Any], Any]:
    """Return the leaves of an argument: differentiable tensors, or jets of an outer call."""
    leaves, spec = flatten(tree)
    flatten_primals(unflatten([tensor_of(each) for each in leaves], spec), caller, argument, complex_too=True)
    for each in leaves:
        if isinstance(each, Tensor) and overrides_functions(each):
            name = type(each).__name__
            raise RouteError(
                f"{caller}: {argument}: expected plain tensors, got {name}, whose __torch_function__ Taylor mode does "
                "not call; use hodiff.hvp, hodiff.hessian or hodiff.jacobian, which call it, or pass "
                "x.as_subclass(torch.Tensor)."
            )
    return leaves, spec
