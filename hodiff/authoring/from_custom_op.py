"""`from_custom_op`: an operator of `torch.library` with all derivatives that follow from its `register_autograd`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from hodiff.authoring.custom_vjp import CustomVJP
from hodiff.errors import InputError
from hodiff.torch_internals.autograd.transforms import in_transform, outside_transforms
from hodiff.torch_internals.autograd.wrapped_tensors import below_transforms
from hodiff.torch_internals.custom_operators import (
    OperatorRule,
    call_by_position,
    is_mutable,
    loses_tangents,
    operator_of,
    rule_of,
    signature_of,
)
from hodiff.torch_internals.interception import RuleMode, without_function_modes
from hodiff.torch_internals.operators import OpOverload


class _Context(SimpleNamespace):
    """The `ctx` passed to an operator's rules; every attribute that they set is a residual."""

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors

    def set_materialize_grads(self, value: bool) -> None:
        """Do nothing: cotangents are always materialized."""

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        """Do nothing: such outputs have zero cotangents."""


def from_custom_op(op: Any) -> Callable[..., Any]:
    r"""Give a custom operator of `torch.library` every derivative, by the rule of its `register_autograd`.

    An operator of `torch.library` supports reverse mode only: its tangent is zero under `torch.func.jvp`, with no
    error, and `torch.func.grad` refuses it. The returned function computes the same value, and is differentiated by the
    same rule $P(x)$ for cotangents. Forward mode is its transpose, $\dot y = P(x)^T \dot x$, and higher derivatives
    differentiate $x \mapsto P(x)$, to any order. `torch.func.vmap` uses the operator's `register_vmap` where torch
    requires it, and `torch.compile` its `register_fake`.

    Args:
        op: An operator defined by `torch.library.custom_op`, or one of `torch.ops`, with `register_autograd`. Its rule
            is composed of torch operators, or of other operators that have derivatives.

    Returns:
        The function, with the arguments of the operator.

    Raises:
        InputError: If `op` is not such an operator, has no rule, or changes its arguments.

    Example:
        >>> import torch, hodiff
        >>> from torch import Tensor
        >>> @torch.library.custom_op("docs::cube", mutates_args=())
        ... def cube(x: Tensor) -> Tensor:
        ...     return x**3
        >>> cube.register_autograd(
        ...     lambda ctx, g: 3 * g * ctx.saved_tensors[0] ** 2,
        ...     setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
        ... )
        >>> x, v = torch.tensor([1.0, 2.0]), torch.ones(2)
        >>> torch.func.jvp(cube, (x,), (v,))[1]  # zero, in silence
        tensor([0., 0.])
        >>> torch.func.jvp(hodiff.authoring.from_custom_op(cube), (x,), (v,))[1]
        tensor([ 3., 12.])
    """
    operator = operator_of(op)
    if operator is None or loses_tangents(operator) is False:
        raise InputError(
            f"from_custom_op: op: expected an operator of torch.library, got {op!r:.60}. Define it by "
            "torch.library.custom_op and register_autograd, or write hodiff.custom_vjp."
        )
    if is_mutable(operator):
        raise InputError(
            "from_custom_op: op: expected an operator that does not change its arguments, got "
            f"{_name_of(operator)}, which changes some. Register an operator with mutates_args=() that returns new "
            "tensors."
        )

    return function_of(operator, rule_of(operator))


def function_of(operator: OpOverload, known: OperatorRule | None) -> CustomVJP:
    """Make a function with all derivatives of an operator's rule; None finds the rule at the first call."""

    def run(*args: Any) -> Any:
        with without_function_modes(RuleMode):  # corrections would replace the operator by this function
            return call_by_position(operator, args)

    run.__name__ = _name_of(operator)
    run.__signature__ = signature_of(operator)  # type: ignore[attr-defined]  # mypy knows no attributes of functions
    function = CustomVJP(run)
    rule = _FoundRule(operator, known)

    def forward(*args: Any) -> Any:
        # Call `function`, not the operator, so that saved outputs depend differentiably on the arguments.
        output, context = function(*args), _Context(needs_input_grad=(True,) * len(args), saved_tensors=())
        rule(args).setup_context(context, args, output)
        return output, vars(context)

    def backward(residuals: Any, cotangent: Any) -> Any:
        cotangents = cotangent if isinstance(cotangent, tuple) else (cotangent,)
        return rule().backward(_Context(**residuals), cotangents)

    function.defvjp(forward, backward)
    return function


class _FoundRule:
    """The rule of an operator, found at the first call if it is not known before."""

    def __init__(self, operator: OpOverload, known: OperatorRule | None):
        self.operator, self.rule = operator, known

    def __call__(self, args: Any = ()) -> OperatorRule:
        if self.rule is None:
            with outside_transforms() if in_transform() else nullcontext():
                below = pytree.tree_map_only(Tensor, below_transforms, args)
                self.rule = rule_of(self.operator, below)
        if self.rule is None:
            raise InputError(
                f"from_custom_op: op: expected an operator with a backward rule, got {_name_of(self.operator)}, "
                "which has none. Call "
                f"torch.library.register_autograd({self.operator.name()!r}, backward, setup_context=...)."
            )
        return self.rule


def _name_of(operator: OpOverload) -> str:
    """Name of an operator below `torch.ops`."""
    return operator.name().replace("::", ".")
