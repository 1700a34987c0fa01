"""Calls of operators that libraries define, by their formulas in `torch.library`, for every transform.

Torch uses the formula in its own reverse mode only. Forward mode silently treats such an operator as a constant, and
`torch.func.grad` refuses it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from hodiff.authoring.from_custom_op import function_of
from hodiff.common.trees import tensors_in
from hodiff.errors import HodiffWarning, levels_to_the_caller
from hodiff.torch_internals.autograd.differentiation import (
    are_differentiated,
    carry_derivatives,
    has_tangent_anywhere,
    may_be_differentiated,
)
from hodiff.torch_internals.autograd.grad_mode import in_forward_mode
from hodiff.torch_internals.autograd.transforms import in_transform
from hodiff.torch_internals.custom_operators import (
    formula_of,
    has_autograd_kernel,
    is_defined_in_python,
    is_mutable,
    operator_in,
    placed_arguments,
)
from hodiff.torch_internals.operators import arguments_of

_function_of = cache(function_of)  # keyed by the formula, too, which a user may register again


def rule_for_call(operator: Any, args: Sequence[Any], kwargs: Any) -> Callable[[], Any] | None:
    """Return the call of a library's operator by its formula; None if it has none, or torch needs no help."""
    operator = operator_in(operator)
    if operator is None or not (in_transform() or in_forward_mode()):
        return None
    tensors = tensors_in((args, kwargs))
    if not are_differentiated(tensors):
        return None
    formula = formula_of(operator)
    if formula is None:
        if is_defined_in_python(operator) and in_transform() and carry_derivatives(tensors):
            raise _missing(operator, "transforms")  # torch's error would name an internal Function
        return None
    placed = placed_arguments(operator, args, kwargs)
    return lambda: _function_of(operator, formula)(*placed)


def require_derivatives(operator: Any, arguments: Any, result: Any) -> None:
    """Raise if a transform silently treated a library's operator without a rule as a constant."""
    operator, tensors = operator_in(operator), tensors_in(arguments)
    outputs = [each for each in tensors_in(result) if each.is_floating_point()]
    if operator is None or not outputs:
        return
    lost = any(map(has_tangent_anywhere, tensors)) and not all(map(has_tangent_anywhere, outputs))
    if lost or (in_transform() and not has_autograd_kernel(operator) and carry_derivatives(tensors)):
        raise _missing(operator, "forward AD" if lost else "transforms")


def require_no_writes(operator: Any, args: Sequence[Any], kwargs: Any) -> None:
    """Raise if a library's operator writes into differentiated tensors; warn if it reads them and writes elsewhere.

    Torch has no derivative of what an operator writes: it uses the tensor's former value, or a constant.
    """
    operator = operator_in(operator)
    if operator is None or not is_mutable(operator):
        return
    if has_autograd_kernel(operator) and not is_defined_in_python(operator):
        return
    if not may_be_differentiated(tensors_in((args, kwargs))):
        return
    arguments, names = arguments_of(operator, args, kwargs)
    written = {name: tensors_in(arguments[name]) for name in names}
    remedy = (
        "torch has no derivative of that. Register the operator with mutates_args=() such that it returns new "
        "tensors, or call it in a function with hodiff.custom_vjp"
    )
    for name, tensors in written.items():
        if may_be_differentiated(tensors) and carry_derivatives(tensors):
            raise NotImplementedError(f"{operator} writes into {name}, which is differentiated, and {remedy}")
    if any(each.is_floating_point() for tensors in written.values() for each in tensors):
        warnings.warn(
            f"{operator} writes into {' and '.join(written)}, from arguments that are differentiated, and {remedy}; "
            "the written values are constants in all derivatives.",
            HodiffWarning,
            stacklevel=levels_to_the_caller(),
        )


def _missing(operator: Any, where: str) -> NotImplementedError:
    return NotImplementedError(
        f"{operator} has no autograd formula for {where}, and torch treats it as a constant or raises an error; "
        f"register a rule by torch.library.custom_op and register_autograd, with tensors by position, or call it in a "
        f"function with hodiff.custom_vjp"
    )
