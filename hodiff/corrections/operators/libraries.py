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

from hodiff.authoring.from_custom_op import function_of
from hodiff.torch_internals.autograd.differentiation import are_differentiated, carry_derivatives, has_tangent_anywhere
from hodiff.torch_internals.autograd.forward_mode import in_forward_mode
from hodiff.torch_internals.autograd.transforms import in_transform
from hodiff.torch_internals.custom_operators import (
    formula_of,
    has_autograd_kernel,
    is_defined_in_python,
    operator_in,
    placed_arguments,
)

_function_of = cache(function_of)  # by its formula, too, which a user may register anew


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
    return lambda: _function_of(operator, formula)(*placed)


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


def _tensors(*arguments: Any) -> list[Tensor]:
    return [each for each in pytree.tree_leaves(arguments) if isinstance(each, Tensor)]
