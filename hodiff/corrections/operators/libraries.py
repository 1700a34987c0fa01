"""Operators that a library has defined: a rule for every transform from the formula that `torch.library` has.

Torch knows the formula in its own reverse mode alone: forward mode takes such an operator for a constant, in silence,
and `torch.func.grad` refuses it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from hodiff.authoring.custom_vjp import CustomVJP
from hodiff.torch_internals.autograd.differentiation import are_differentiated, carry_derivatives, has_tangent_anywhere
from hodiff.torch_internals.autograd.forward_mode import in_forward_mode
from hodiff.torch_internals.autograd.transforms import in_transform
from hodiff.torch_internals.custom_operators import (
    OperatorRule,
    call_by_position,
    formula_of,
    has_autograd_kernel,
    is_defined_in_python,
    operator_in,
    placed_arguments,
)


def rule_for_call(operator: Any, args: Sequence[Any], kwargs: Any) -> Callable[[], Any] | None:
    """The call of a library's operator by its formula; None where nothing that torch overlooks differentiates it."""
    operator = operator_in(operator)
    if operator is None or not (in_transform() or in_forward_mode()) or not are_differentiated(_tensors(args, kwargs)):
        return None
    formula = formula_of(operator)
    if formula is None:
        if is_defined_in_python(operator) and in_transform() and carry_derivatives(_tensors(args, kwargs)):
            raise _missing(operator, "transforms")  # where torch speaks of the Function that it has made
        return None
    placed = placed_arguments(operator, args, kwargs)
    return lambda: _rule(operator, formula)(*placed)


def require_derivatives(operator: Any, arguments: Any, result: Any) -> None:
    """Refuse what a transform has made of a library's operator without a rule for it: a constant, in silence."""
    operator, tensors = operator_in(operator), _tensors(arguments)
    outputs = [each for each in _tensors(result) if each.is_floating_point()]
    if operator is None or not outputs:
        return
    lost = any(map(has_tangent_anywhere, tensors)) and not all(map(has_tangent_anywhere, outputs))
    if lost or (in_transform() and not has_autograd_kernel(operator) and carry_derivatives(tensors)):
        raise _missing(operator, "forward AD" if lost else "transforms")


def _missing(operator: Any, where: str) -> NotImplementedError:
    return NotImplementedError(
        f"{operator} has no autograd formula for {where}, and torch takes it for a constant there or refuses it; give "
        "it one by torch.library.custom_op and register_autograd, with tensors by position, or put it into a function "
        "with hodiff.custom_vjp"
    )


@cache
def _rule(operator: Any, formula: OperatorRule) -> CustomVJP:
    """The operator as a function whose rule is its formula."""

    def call(*args: Any) -> Any:
        return call_by_position(operator, args)

    def forward(*args: Any) -> Any:
        output = call_by_position(operator, args)
        context = _Context()
        formula.setup_context(context, args, output)
        return output, dict(vars(context))

    def backward(kept: dict[str, Any], cotangent: Any) -> tuple[Any, ...]:
        context = _Context()
        vars(context).update(kept)
        return formula.backward(context, cotangent if isinstance(cotangent, tuple) else (cotangent,))

    call.__name__ = str(operator)
    rule = CustomVJP(call)
    rule.defvjp(forward, backward)
    return rule


class _Context:
    """Keeps what a formula's setup_context saves, as the context of a Function does."""

    def __init__(self) -> None:
        self.saved_tensors: tuple[Any, ...] = ()

    def save_for_backward(self, *tensors: Any) -> None:
        """Keep tensors for backward."""
        self.saved_tensors = tensors

    @property
    def needs_input_grad(self) -> _All:
        """All gradients are computed; what is not needed is dropped."""
        return _All()

    def mark_non_differentiable(self, *tensors: Any) -> None:
        """Do nothing: such outputs have zero cotangents."""

    def set_materialize_grads(self, value: bool) -> None:
        """Do nothing: cotangents are materialized, which a formula for undefined ones takes, too."""


class _All(tuple[bool, ...]):
    """True at every position."""

    __slots__ = ()

    def __getitem__(self, index: Any) -> Any:
        return True


def _tensors(*arguments: Any) -> list[Tensor]:
    return [each for each in pytree.tree_leaves(arguments) if isinstance(each, Tensor)]
