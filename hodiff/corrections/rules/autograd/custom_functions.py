"""Rules for Functions of other libraries, whose `jvp` is a constant to an outer forward pass in torch.

Functions that are marked once_differentiable raise where second derivatives would silently be zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from hodiff.common.trees import tensors_in
from hodiff.corrections.mechanism.declining import UNNEEDED, Redirected
from hodiff.corrections.mechanism.mode import Corrections
from hodiff.corrections.mechanism.registry import register
from hodiff.errors import RouteError
from hodiff.graphs import inspect_graph, is_once_differentiable
from hodiff.recompute.cut_graphs import UnrecordedGradientError, lost_slope, refuse_cuts_of, unrecorded
from hodiff.recompute.slope_differences import loses_operands, loses_recorded
from hodiff.recompute.slopes import SCHEDULE, form_of, numbers_on, reads_elsewhere
from hodiff.routes import ROUTES
from hodiff.rules.any_order import outside_graphs
from hodiff.rules.nesting import nestable_jvp, without_own_tangents
from hodiff.torch_internals.autograd.differentiation import carry_derivatives
from hodiff.torch_internals.autograd.grad_mode import set_tangents
from hodiff.torch_internals.autograd.graph_nodes import place_of
from hodiff.torch_internals.autograd.transforms import (
    differentiating_count,
    in_transform,
    innermost_differentiating_level,
    innermost_jvp_level,
    outside_transforms,
)
from hodiff.torch_internals.autograd.wrapped_tensors import (
    below_batches,
    below_one,
    below_transforms,
    is_wrapped,
    level_of,
    without_tangent,
)
from hodiff.torch_internals.interception import apply_in_transform

_silent = partial(
    register,
    kind="missing",
    routes=ROUTES,
    reason="the gradient of a Function marked once_differentiable is silently a constant",
    reference="raises an error instead",
)


@_silent(torch.autograd.grad)
def _grad(outputs: Tensor | Sequence[Tensor], inputs: Any, grad_outputs: Any = None, *args: Any, **kwargs: Any) -> Any:
    del grad_outputs
    create_graph = args[1] if len(args) > 1 else kwargs.get("create_graph", False)
    if create_graph:
        _refuse_constant_gradients(outputs, inputs)
    # Torch's function runs once, outside the rule, so that its errors are raised unchanged.
    return UNNEEDED


@_silent(torch.Tensor.backward)
def _tensor_backward(
    self: Tensor, gradient: Any = None, retain_graph: Any = None, create_graph: bool = False, inputs: Any = None
) -> Any:
    del gradient, retain_graph
    if create_graph:
        _refuse_constant_gradients(self, inputs)
    return UNNEEDED


def _refuse_constant_gradients(outputs: Tensor | Sequence[Tensor], inputs: Any) -> None:
    """Raise if the gradient will be differentiated and a Function in the graph returns a constant gradient."""
    # In plain torch create_graph shows it. torch.func always records, so it takes an outer transform there.
    transformed = in_transform()
    if transformed and differentiating_count() < 2:
        return
    for output in _tensors_in(outputs):
        if not transformed and is_wrapped(output):  # a pullback of torch.func.vjp, which has ended
            continue
        found = inspect_graph(output)
        if found.once is not None:
            raise RouteError(
                f"{found.once}: a second derivative would be silently wrong. Write the backward of a Function with "
                "torch operators or other Functions and remove the decorator, replace an operator that takes "
                "functions by plain Python, or compute the gradient without create_graph."
            )
        # Inside transforms, the rules of Functions check this themselves.
        if found.functions and not transformed and not torch.compiler.is_compiling():
            operands = found.leaves if inputs is None else list(_tensors_in(inputs))
            try:
                refuse_cuts_of(output, found.functions, operands)
            except UnrecordedGradientError as error:
                raise RouteError(f"{error}; or compute the gradient without create_graph.") from error


def _tensors_in(outputs: Tensor | Sequence[Tensor]) -> Iterator[Tensor]:
    candidates = (outputs,) if isinstance(outputs, Tensor) else outputs
    yield from (each for each in candidates if isinstance(each, Tensor))  # others are edges of a graph


_REMEDY = (
    "write it with torch operators or other Functions of ctx.saved_tensors, or use hodiff.custom_jvp or "
    "hodiff.custom_vjp"
)


@register(
    apply_in_transform,
    name="torch.autograd.Function.apply",
    routes=("forward-over-forward",),
    reason="torch runs the jvp of a Function with forward mode off, so an outer forward pass sees a constant",
    reference="hodiff.functions.nestable_jvp, applied to the jvp",
)
def _apply(function: type[Function], *operands: Any, **_: Any) -> Any:
    if function.__module__.startswith("hodiff.") or not _rules_are_differentiated(operands):
        return UNNEEDED
    return Redirected((_nestable(function, operands), *operands))


def _rules_are_differentiated(operands: Sequence[Any]) -> bool:
    """Whether an outer pass differentiates the Function's rules: another transform, or a recording."""
    count = differentiating_count()
    if count != 1 or not torch.is_grad_enabled():
        return count > 1
    return any(isinstance(each, Tensor) and below_transforms(each).requires_grad for each in operands)


def _nestable(function: Any, operands: Sequence[Any]) -> type[Function]:
    """Return a copy of a Function whose rules can be differentiated by outer passes."""

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        function.setup_context(ctx, inputs, output)
        ctx.hodiff_outside = [] if torch.compiler.is_compiling() else _numbers_outside(tensors_in(inputs))

    # The mode is off while it handles the call of the Function, so each rule enters it again. The rules close over the
    # Function, so that code that has only a graph node finds it.
    def backward(ctx: Any, *cotangents: Any) -> Any:
        with Corrections():
            pulled = function.backward(ctx, *cotangents)
            if torch.compiler.is_compiling():
                return pulled
            # Otherwise nothing differentiates the returned gradients.
            if carry_derivatives(ctx.hodiff_outside) or carry_derivatives(_outside(tensors_in(cotangents))):
                pull, seeded = partial(function.backward, ctx), partial(_depending_on, ctx.hodiff_outside)
                _require_recorded(function, "backward", pull, pulled, seeded, cotangents)
                form = "transforms", *form_of(ctx)
                if SCHEDULE.is_due(function, form) and _loses_slope(function, ctx, operands, cotangents):
                    SCHEDULE.begin_again(function, form)
                    raise RouteError(lost_slope(_described(function, "backward"), linear=False, instead=_REMEDY))
            return pulled

    @nestable_jvp
    def jvp(ctx: Any, *tangents: Any) -> Any:
        def push(*tangents: Any) -> Any:
            return without_own_tangents(function.jvp(ctx, *tangents))

        with Corrections():
            pushed = push(*tangents)
            level = innermost_jvp_level()
            if level is not None and not torch.compiler.is_compiling():
                _require_recorded(function, "jvp", push, pushed, partial(_seeded, operands, level), tangents)
            return pushed

    def vmap(*args: Any) -> Any:
        with Corrections():
            return function.vmap(*args)

    members = {
        "__module__": function.__module__,
        "generate_vmap_rule": function.generate_vmap_rule,
        "forward": staticmethod(function.forward),
        "setup_context": staticmethod(setup_context),
        "backward": staticmethod(backward),
        "jvp": staticmethod(jvp),
        # torch compares `vmap` with the inherited method to see whether a Function has a rule.
        "vmap": staticmethod(Function.vmap if function.vmap is Function.vmap else vmap),
        # Below all transforms the Function itself runs.
        "apply": staticmethod(function.apply),
    }
    return type(function.__name__, (Function,), members)


# After a graph break, dynamo would compile the frames inside one by one, in the middle of transforms.
@outside_graphs
def _require_recorded(
    function: Any,
    kind: str,
    rule: Callable[..., Any],
    found: Any,
    seeded: Callable[[Sequence[Any]], list[Any]],
    given: Sequence[Any],
) -> None:
    """Raise if the result of a rule loses the dependencies of its tangents or cotangents.

    The result is linear in the tangents or cotangents. If it does not depend on the variables of outer passes, the rule
    runs once more, on equal numbers that do depend on them.

    Raises:
        RouteError: If the second result does not depend on them, either.
    """
    if not any(map(_is_nonzero, _unrecorded(found))):
        return
    given = seeded(given)
    if not carry_derivatives(tensors_in(given)):
        return
    found = rule(*given)
    if carry_derivatives(tensors_in(found)) or not any(map(_is_nonzero, _unrecorded(found))):
        return
    if kind == "backward" and is_once_differentiable(function):
        raise RouteError(f"{function.__name__}.backward is marked once_differentiable; {_REMEDY}")
    raise RouteError(unrecorded(_described(function, kind), _REMEDY))


def _loses_slope(function: Any, ctx: Any, operands: Sequence[Any], cotangents: Sequence[Any]) -> bool:
    # A saved tensor that is no operand may have been computed from operands.
    own = [below_transforms(each) for each in operands if isinstance(each, Tensor)]
    kept = [below_transforms(each) if isinstance(each, Tensor) else each for each in numbers_on(ctx)]
    if reads_elsewhere(function) or not all(any(each is other for other in own) for each in kept):
        return loses_operands(function, ctx, operands, cotangents)
    return loses_recorded(function, ctx, cotangents)


def _described(function: Any, kind: str) -> str:
    return f"{function.__name__}.{kind}{place_of(getattr(function, kind))}"


def _numbers_outside(operands: Sequence[Tensor]) -> list[Tensor]:
    """Return one number per operand that depends on it outside the innermost pass, without keeping its memory."""
    with torch.enable_grad(), set_tangents(True):  # both are off while a Function's rules run
        return [each.reshape(-1)[:1].sum() for each in _outside(operands)]


def _outside(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the wrapped tensors as seen outside the innermost differentiating pass."""
    level = innermost_differentiating_level()
    moving = [below_batches(x) for x in tensors if x.is_floating_point() and x.layout is torch.strided]
    return [below_one(x) if level_of(x) == level else x for x in moving if is_wrapped(x)]


def _depending_on(numbers: Sequence[Tensor], cotangents: Sequence[Any]) -> list[Any]:
    """Make cotangents depend on the first number that carries derivatives, without changing their values."""
    anchor = next((each for each in numbers if carry_derivatives([each])), None)
    if anchor is None:
        return list(cotangents)
    return [
        torch.where(torch.ones_like(each, dtype=torch.bool), each, anchor.to(each))
        if isinstance(each, Tensor)
        else each
        for each in cotangents
    ]


def _seeded(operands: Sequence[Any], level: int, tangents: Sequence[Any]) -> list[Any]:
    """Make tangents depend on their operands outside a pass, without changing their values."""
    found = []
    for tangent, operand in zip(tangents, operands, strict=True):
        # Unwrap the levels of passes inside this one.
        while isinstance(operand, Tensor) and is_wrapped(operand) and level_of(operand) > level:
            operand = below_one(operand)
        if isinstance(tangent, Tensor) and isinstance(operand, Tensor) and operand.shape == tangent.shape:
            tangent = torch.where(torch.ones_like(tangent, dtype=torch.bool), tangent, without_tangent(operand, level))
        found.append(tangent)
    return found


def _unrecorded(tree: Any) -> list[Tensor]:
    return [each for each in tensors_in(tree) if not carry_derivatives([each])]


def _is_nonzero(tensor: Tensor) -> bool:
    with outside_transforms():
        return bool(below_transforms(tensor).detach().any())
