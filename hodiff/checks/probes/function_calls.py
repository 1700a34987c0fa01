"""Custom Functions that a function calls, with their arguments, so that rules can be called directly."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from hodiff.checks.probes.cause import Explains, by_forward, by_reverse, every_entry
from hodiff.checks.probes.context import StandInContext
from hodiff.graphs import nodes_of
from hodiff.recompute.slopes import has_derivatives
from hodiff.torch_internals.autograd.graph_nodes import function_of
from hodiff.torch_internals.custom_operators import OperatorRule, call_by_position, rule_in, signature_of, with_defaults

# Takes the floating leaves of a point, returns the floating outputs.
LeavesFunction = Callable[..., tuple[Tensor, ...]]


@dataclass(frozen=True)
class FunctionCall:
    """Call of a custom Function.

    Attributes:
        function: The Function's class.
        args: Its arguments; no tensor among them requires grad.
        moving: Whether each argument is differentiated.
        truth: The same function for float64, if the Function itself has too few digits.
        of_operator: Whether the Function represents an operator of torch.library and its `register_autograd` rule.
    """

    function: type[Function]
    args: tuple[Any, ...]
    moving: tuple[bool, ...]
    truth: Callable[..., Any] | None = None
    of_operator: bool = False

    @property
    def name(self) -> str:
        """Name of the Function's class."""
        return self.function.__name__

    @property
    def eps(self) -> float:
        """The coarsest rounding among the arguments."""
        dtypes = [a.dtype for a in self.args if isinstance(a, Tensor) and a.is_floating_point()]
        return max((torch.finfo(dtype).eps for dtype in dtypes), default=torch.finfo(torch.float64).eps)

    @property
    def takes_context(self) -> bool:
        """Whether forward takes ctx, as in old Functions."""
        return self.function.setup_context is Function.setup_context

    @property
    def backward(self) -> Callable[..., Any]:
        """The Function's backward, under either of torch's two names."""
        return self.function.vjp if self.function.vjp is not Function.vjp else self.function.backward

    @property
    def has_jvp(self) -> bool:
        """Whether the Function defines a jvp."""
        return self.function.jvp is not Function.jvp

    def argument(self, index: int) -> str:
        """Return the name of an argument in the source."""
        names = list(inspect.signature(self.function.forward).parameters)[int(self.takes_context) :]
        return names[index] if index < len(names) else f"argument {index}"

    def fresh(self) -> FunctionCall:
        """Return the call with cloned tensors, since a Function may write into them."""
        return replace(self, args=cloned(self.args))

    def at(self, values: dict[int, Tensor]) -> FunctionCall:
        """Return the call with some arguments replaced."""
        return replace(self, args=tuple(values.get(i, a) for i, a in enumerate(self.args)))

    def moves(self) -> list[int]:
        """Return the positions of the arguments that are differentiated."""
        return [i for i, moving in enumerate(self.moving) if moving]

    def run(self) -> ForwardRun:
        """Run forward and set up a context, as torch does without a graph."""
        context = StandInContext(self.moving)
        with torch.no_grad():
            if self.takes_context:
                output = self.function.forward(context, *self.args)
            else:
                output = self.function.forward(*self.args)
                self.function.setup_context(context, self.args, output)
        outputs = output if isinstance(output, tuple | list) else (output,)
        return ForwardRun(self, context, tuple(outputs))


@dataclass(frozen=True)
class ForwardRun:
    """Call of a custom Function after its forward.

    Attributes:
        call: The call.
        context: The context, with saved tensors.
        outputs: The outputs.
    """

    call: FunctionCall
    context: StandInContext
    outputs: tuple[Any, ...]

    def differentiable(self, k: int) -> bool:
        """Whether the output has a gradient."""
        y = self.outputs[k]
        if not isinstance(y, Tensor) or not (y.is_floating_point() or y.is_complex()):
            return False
        return not any(y is constant for constant in self.context.constant_outputs)

    def cotangents(self, generator: torch.Generator, only: int | None = None) -> tuple[Any, ...]:
        """Return random incoming gradients, optionally of one output only; constant outputs get zeros."""

        def incoming(k: int, y: Any) -> Any:
            if self.differentiable(k) and only in {None, k}:
                return torch.randn(y.shape, generator=generator, dtype=torch.float64, device=generator.device).to(y)
            if isinstance(y, Tensor) and (self.context.materializes or self.differentiable(k)):
                return torch.zeros_like(y) if y.is_floating_point() or y.is_complex() else None
            return None

        return tuple(incoming(k, y) for k, y in enumerate(self.outputs))

    def tangents(self, generator: torch.Generator) -> tuple[Any, ...]:
        """Return random tangents of differentiated arguments, and None for other arguments."""
        return tuple(
            torch.randn(a.shape, generator=generator, dtype=torch.float64, device=generator.device).to(a)
            if moving
            else None
            for a, moving in zip(self.call.args, self.call.moving, strict=True)
        )

    def pull(self, cotangents: tuple[Any, ...], context: StandInContext | None = None) -> tuple[Any, ...]:
        """Call backward."""
        context = self.context if context is None else context
        context.reading = "backward"
        return as_tuple(self.call.backward(context, *cotangents))

    def gradients(self, context: StandInContext | None = None) -> tuple[Any, ...]:
        """Call backward with incoming gradients that are equal in each call."""
        with torch.no_grad():
            return self.pull(self.cotangents(torch.Generator().manual_seed(0)), context)

    def push(self, tangents: tuple[Any, ...], context: StandInContext | None = None) -> tuple[Any, ...]:
        """Call jvp."""
        context = self.context if context is None else context
        context.reading = "forward"
        given = [
            torch.zeros_like(a) if t is None and self.context.materializes and has_derivatives(a) else t
            for a, t in zip(self.call.args, tangents, strict=True)
        ]
        return as_tuple(self.call.function.jvp(context, *given))


# Name of a rule, its call with seeded incoming numbers, and the entries that follow from it.
Rule = tuple[str, Callable[[ForwardRun], tuple[Any, ...]], Explains]

_RULES: tuple[Rule, ...] = (
    ("forward", lambda ran: ran.outputs, every_entry),
    ("backward", lambda ran: ran.pull(ran.cotangents(torch.Generator().manual_seed(0))), by_reverse),
    ("jvp", lambda ran: ran.push(ran.tangents(torch.Generator().manual_seed(0))), by_forward),
)


def rules_of(call: FunctionCall) -> list[Rule]:
    """Return the rules that a Function has, forward first."""
    return [rule for rule in _RULES if rule[0] != "jvp" or call.has_jvp]


def as_tuple(result: Any) -> tuple[Any, ...]:
    """Return the result of a rule as a tuple."""
    return tuple(result) if isinstance(result, tuple | list) else (result,)


def cloned(values: Iterable[Any]) -> tuple[Any, ...]:
    """Clone the tensors among some values."""
    return tuple(each.clone() if isinstance(each, Tensor) else each for each in values)


def function_calls(function: LeavesFunction, leaves: tuple[Tensor, ...], own: Any) -> list[FunctionCall]:
    """Return a call of each custom Function inside, without those of torch and hodiff except `own`."""
    found: list[type[Function]] = []
    tracked = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    with torch.enable_grad():
        outputs = function(*(leaf.clone() for leaf in tracked))
    for output in outputs:
        for node in nodes_of(output):
            cls = function_of(node)
            if cls is None or cls in found:
                continue
            if cls.__module__.startswith(("torch.", "hodiff.")) and cls is not own and rule_in(cls) is None:
                continue
            found.append(cls)
    return recorded_calls(found, function, leaves)


def recorded_calls(
    functions: list[type[Function]], function: LeavesFunction, leaves: tuple[Tensor, ...]
) -> list[FunctionCall]:
    """Return the first call of each Function within a function."""
    tracked = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    calls: dict[type[Function], FunctionCall] = {}
    with _recorded(functions, calls), torch.enable_grad():
        function(*(leaf.clone() for leaf in tracked))
    return [calls[cls] for cls in functions if cls in calls]


@contextmanager
def _recorded(functions: list[type[Function]], calls: dict[type[Function], FunctionCall]) -> Iterator[None]:
    """Record the arguments of each Function's first call; restore the classes afterwards."""
    before = {cls: vars(cls).get("forward") for cls in functions}
    try:
        for cls in functions:
            # mypy forbids assignments to methods; the method is restored below.
            cls.forward = staticmethod(_recording(cls, calls))  # type: ignore[method-assign]
        yield
    finally:
        for cls, forward in before.items():
            if forward is None:
                del cls.forward
            else:
                # mypy forbids this assignment, too.
                cls.forward = forward  # type: ignore[method-assign]


def _stand_in(rule: OperatorRule) -> type[Function]:
    """Return a Function of an operator of torch.library, built from its kernel and registered rule."""

    def forward(*args: Any) -> Any:
        return call_by_position(rule.operator, args)

    forward.__signature__ = signature_of(rule.operator)  # type: ignore[attr-defined]  # for the names of arguments

    @wraps(rule.given_context or rule.setup_context)
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        rule.setup_context(ctx, inputs, output)

    @wraps(rule.given)
    def backward(ctx: Any, *cotangents: Any) -> Any:
        return rule.backward(ctx, cotangents)

    rules: dict[str, Callable[..., Any]] = {"forward": forward, "setup_context": setup_context, "backward": backward}
    name = rule.operator.name().replace("::", ".")
    return type(name, (Function,), {each: staticmethod(one) for each, one in rules.items()})


def _recording(cls: type[Function], calls: dict[type[Function], FunctionCall]) -> Callable[..., Any]:
    forward, rule = cls.forward, rule_in(cls)
    takes_context = cls.setup_context is Function.setup_context

    @wraps(forward)
    def recording(*args: Any) -> Any:
        given = args[int(takes_context) :]
        if cls not in calls:
            needs = args[0].needs_input_grad if takes_context else tuple(_moves(a) for a in given)
            held = tuple(a.detach().clone() if isinstance(a, Tensor) else a for a in given)
            if rule is None:
                calls[cls] = FunctionCall(cls, held, tuple(needs))
            else:
                # The last argument is torch's metadata of the call.
                held = with_defaults(rule.operator, held[:-1])
                moving = tuple(i < len(needs) - 1 and needs[i] for i in range(len(held)))
                calls[cls] = FunctionCall(_stand_in(rule), held, moving, of_operator=True)
        return forward(*args)

    return recording


def _moves(argument: Any) -> bool:
    return isinstance(argument, Tensor) and argument.requires_grad and argument.is_floating_point()
