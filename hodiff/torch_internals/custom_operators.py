"""Operators that a library has defined."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS, CustomOpDef
from torch.utils import _pytree as pytree

from hodiff.torch_internals.autograd.graph_nodes import function_of
from hodiff.torch_internals.operators import OpOverload, OpOverloadPacket

# torch's own have forward rules, or say that they have none; hodiff's are called inside of Functions.
_TRUSTED = {"aten", "prim", "prims", "hodiff"}


def operator_in(function: Any) -> Any:
    """The library's operator that a function is, if it is one that torch's forward mode may take for a constant."""
    function = operator_of(function)
    if function is None:
        return None
    # Asked first: torch calls some of its own where an exception would end the process.
    if function.namespace in _TRUSTED:
        return None
    # One that is made of others is differentiated as they are.
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(function.name(), "CompositeImplicitAutograd")
    return None if composite else function


def loses_tangents(function: Any) -> bool:
    """Whether a function is an operator that torch's forward mode takes for a constant without a word."""
    return operator_in(function) is not None


def operator_of(function: Any) -> OpOverload | None:
    """The operator that a function of `torch.ops`, or of `torch.library.custom_op`, is; None if it is none."""
    if isinstance(function, CustomOpDef):
        function = function._opoverload
    if isinstance(function, OpOverloadPacket):
        function = getattr(function, function.overloads()[0])
    return function if isinstance(function, OpOverload) else None


@dataclass(frozen=True)
class OperatorRule:
    """An operator of torch.library and the rule of its `register_autograd`.

    Attributes:
        operator: The operator.
        given: The rule for cotangents, `backward(ctx, *cotangents)`, as it was registered.
        given_context: What saves for it, `setup_context(ctx, inputs, output)`; None where nothing does.
    """

    operator: OpOverload
    given: Callable[..., Any]
    given_context: Callable[..., Any] | None

    def backward(self, context: Any, cotangents: tuple[Any, ...]) -> tuple[Any, ...]:
        """The cotangents of all arguments by position; those by keyword alone have none."""
        found = self.given(context, *cotangents)
        found = found if isinstance(found, tuple) else (found,)
        return *found, *(None for _ in _keyword_only(self.operator))

    def setup_context(self, context: Any, args: tuple[Any, ...], output: Any) -> None:
        """Save what the rule asks for, of all arguments by position."""
        if self.given_context is None:
            return
        by_keyword = _keyword_only(self.operator)
        count = len(args) - len(by_keyword)
        options = {"keyword_only_inputs": dict(zip(by_keyword, args[count:], strict=True))} if by_keyword else {}
        self.given_context(ctx=context, inputs=args[:count], output=output, **options)


def rule_of(operator: OpOverload, args: Sequence[Any] | None = None) -> OperatorRule | None:
    """The rule that `register_autograd` was given for an operator; None if there is none.

    Args:
        operator: The operator.
        args: Arguments that it takes. A rule that was registered for an operator of others is found by a call alone.

    Returns:
        The rule.
    """
    known = OPDEFS.get(operator.name().partition(".")[0])
    if known is not None:
        return _rule(operator, known)
    if args is None:
        return None
    leaves = pytree.tree_map_only(Tensor, _leaf, list(args))
    with torch.enable_grad():
        outputs = pytree.tree_leaves(call_by_position(operator, leaves))
    nodes = (each.grad_fn for each in outputs if isinstance(each, Tensor) and each.grad_fn is not None)
    return next(filter(None, (rule_in(function_of(node)) for node in nodes)), None)


def rule_in(function: Any) -> OperatorRule | None:
    """The rule behind a Function that torch made for an operator of torch.library; None if it is no such Function."""
    if not getattr(function, "__name__", "").startswith("GeneratedBackwardFor_"):
        return None
    found = inspect.getclosurevars(function.backward).nonlocals
    # Of an operator with lists of tensors, what torch made is wrapped once more.
    found = inspect.getclosurevars(found["orig_backward"]).nonlocals if "orig_backward" in found else found
    return _rule(found["op"], found["info"]) if {"op", "info"} <= found.keys() else None


def call_by_position(operator: OpOverload, args: Sequence[Any]) -> Any:
    """An operator of all its arguments by position."""
    by_keyword = _keyword_only(operator)
    count = len(args) - len(by_keyword)
    return operator(*args[:count], **dict(zip(by_keyword, args[count:], strict=True)))


def with_defaults(operator: OpOverload, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments by position, with those at the end that have their default and that torch therefore leaves out."""
    rest = operator._schema.arguments[len(args) :]
    return *args, *(each.default_value for each in rest if each.has_default_value())


def signature_of(operator: OpOverload) -> inspect.Signature:
    """The arguments of an operator, each with a position."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Signature([
        inspect.Parameter(
            each.name, kind, default=each.default_value if each.has_default_value() else inspect.Parameter.empty
        )
        for each in operator._schema.arguments
    ])


def is_mutable(operator: OpOverload) -> bool:
    """Whether an operator writes into its arguments."""
    return bool(operator._schema.is_mutable)


def _rule(operator: OpOverload, info: Any) -> OperatorRule | None:
    backward = info._backward_fn
    return None if backward is None else OperatorRule(operator, backward, info._setup_context_fn)


def _leaf(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.requires_grad_() if tensor.is_floating_point() or tensor.is_complex() else tensor


def _keyword_only(operator: OpOverload) -> list[str]:
    return [each.name for each in operator._schema.arguments if each.kwarg_only]


def formula_of(operator: OpOverload) -> OperatorRule | None:
    """The rule of an operator of `torch.library.custom_op`, if it was given one."""
    definition = _definition(operator)
    return None if definition is None else _rule(operator, definition)


def _definition(operator: OpOverload) -> CustomOpDef | None:
    return OPDEFS.get(operator.name().partition(".")[0])


def has_autograd_kernel(operator: Any) -> bool:
    """Whether an operator says itself what its derivative is, on some device."""
    keys = ("Autograd", "AutogradCPU", "AutogradCUDA")
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), key) for key in keys)


def is_defined_in_python(operator: Any) -> bool:
    """Whether `torch.library.custom_op` made an operator, which raises in reverse mode without a formula."""
    return _definition(operator) is not None


def has_formula(function: Any) -> bool:
    """Whether a function is a library's operator with a formula."""
    operator = operator_in(function)
    return operator is not None and formula_of(operator) is not None


def placed_arguments(operator: Any, args: Sequence[Any], kwargs: Any) -> tuple[Any, ...]:
    """All arguments of a call by position, as `call_by_position` takes them."""
    schema = operator._schema
    named = {each.name: kwargs[each.name] for each in schema.arguments if each.name in kwargs}
    names = [each.name for each in schema.arguments[len(args) :]]
    rest = [
        named[name] if name in named else schema.arguments[len(args) + i].default_value for i, name in enumerate(names)
    ]
    return (*args, *rest)
