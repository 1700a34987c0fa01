"""Operators that libraries define, and their derivative rules."""

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

# torch's operators have forward rules or raise; hodiff's are called inside of Functions.
_TRUSTED = {"aten", "prim", "prims", "hodiff"}


def operator_in(function: Any) -> Any:
    """Return a function's library operator, if torch's forward mode may treat it as a constant; otherwise None."""
    function = operator_of(function)
    if function is None:
        return None
    # Check this first: torch calls some of its operators where an exception would end the process.
    if function.namespace in _TRUSTED:
        return None
    # An operator composed of others is differentiated through them.
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(function.name(), "CompositeImplicitAutograd")
    return None if composite else function


def loses_tangents(function: Any) -> bool:
    """Whether a function is an operator that torch's forward mode silently treats as a constant."""
    return operator_in(function) is not None


def operator_of(function: Any) -> OpOverload | None:
    """Return the operator of a function of `torch.ops`, or of `torch.library.custom_op`; None for other functions."""
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
        given_context: The registered `setup_context(ctx, inputs, output)`, which saves for the rule, or None.
    """

    operator: OpOverload
    given: Callable[..., Any]
    given_context: Callable[..., Any] | None

    def backward(self, context: Any, cotangents: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the cotangents of all arguments by position; keyword-only arguments have None."""
        found = self.given(context, *cotangents)
        found = found if isinstance(found, tuple) else (found,)
        return *found, *(None for _ in _keyword_only(self.operator))

    def setup_context(self, context: Any, args: tuple[Any, ...], output: Any) -> None:
        """Call the registered `setup_context` with all arguments by position."""
        if self.given_context is None:
            return
        by_keyword = _keyword_only(self.operator)
        count = len(args) - len(by_keyword)
        options = {"keyword_only_inputs": dict(zip(by_keyword, args[count:], strict=True))} if by_keyword else {}
        self.given_context(ctx=context, inputs=args[:count], output=output, **options)


def rule_of(operator: OpOverload, args: Sequence[Any] | None = None) -> OperatorRule | None:
    """Return the rule that was registered for an operator by `register_autograd`, or None.

    Args:
        operator: The operator.
        args: Example arguments. Rules of operators not made by `custom_op` can only be found by a call.

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
    """Return the rule behind a Function that torch made for a torch.library operator; None for other Functions."""
    if not getattr(function, "__name__", "").startswith("GeneratedBackwardFor_"):
        return None
    found = inspect.getclosurevars(function.backward).nonlocals
    # For an operator with lists of tensors, torch wraps its Function once more.
    found = inspect.getclosurevars(found["orig_backward"]).nonlocals if "orig_backward" in found else found
    return _rule(found["op"], found["info"]) if {"op", "info"} <= found.keys() else None


def call_by_position(operator: OpOverload, args: Sequence[Any]) -> Any:
    """Call an operator with all its arguments by position."""
    by_keyword = _keyword_only(operator)
    count = len(args) - len(by_keyword)
    return operator(*args[:count], **dict(zip(by_keyword, args[count:], strict=True)))


def with_defaults(operator: OpOverload, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Append the defaults of trailing arguments, which torch leaves out."""
    rest = operator._schema.arguments[len(args) :]
    return *args, *(each.default_value for each in rest if each.has_default_value())


def signature_of(operator: OpOverload) -> inspect.Signature:
    """Return the signature of an operator with all arguments by position."""
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
    """Return the rule of an operator of `torch.library.custom_op`, or None."""
    definition = _definition(operator)
    return None if definition is None else _rule(operator, definition)


def _definition(operator: OpOverload) -> CustomOpDef | None:
    return OPDEFS.get(operator.name().partition(".")[0])


def has_autograd_kernel(operator: Any) -> bool:
    """Whether an operator has its own autograd kernel, on some device."""
    keys = ("Autograd", "AutogradCPU", "AutogradCUDA")
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), key) for key in keys)


def is_defined_in_python(operator: Any) -> bool:
    """Whether an operator was made by `torch.library.custom_op`; without a formula it raises in reverse mode."""
    return _definition(operator) is not None


def has_formula(function: Any) -> bool:
    """Whether a function is a library's operator with a formula."""
    operator = operator_in(function)
    return operator is not None and formula_of(operator) is not None


def placed_arguments(operator: Any, args: Sequence[Any], kwargs: Any) -> tuple[Any, ...]:
    """Return all arguments of a call by position, as `call_by_position` takes them."""
    schema = operator._schema
    named = {each.name: kwargs[each.name] for each in schema.arguments if each.name in kwargs}
    names = [each.name for each in schema.arguments[len(args) :]]
    rest = [
        named[name] if name in named else schema.arguments[len(args) + i].default_value for i, name in enumerate(names)
    ]
    return (*args, *rest)
