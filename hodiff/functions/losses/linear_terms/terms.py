r"""The terms of a cross-entropy of linear logits as a Function, with derivatives of every order, by tiles of logits.

Backward and forward mode recompute logits. Because the Hessian of $\langle \gamma, L \rangle$ is symmetric, one
formula, the tangent of the gradient, serves both derivatives of the gradient, and backward of the tangent. Its own
derivatives are computed by blocks of samples.

If x and weight have tangents, the matrix products of the size of all logits are 1 for the value, 3 for the gradient and
3 for the tangent of the value; `curvature` counts the products for the tangent of the gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hodiff.functions.losses.cross_entropy import class_of
from hodiff.functions.losses.linear_terms import gradient_tangents, tiles
from hodiff.functions.losses.linear_terms import term_formulas as formulas
from hodiff.functions.losses.linear_terms.term_formulas import Options
from hodiff.functions.losses.linear_terms.term_rules import DIRECTIONS, OWN, Rule, batched, by_tiles, chosen, evaluated
from hodiff.rules.any_order import AnyOrderFunction, in_dtype
from hodiff.rules.blockwise import Plan, RowBlocks
from hodiff.rules.nesting import nestable_jvp
from hodiff.rules.saving import placed


class LinearCrossEntropy(AnyOrderFunction):
    """Log-sum-exp, logit of the target and weighted sum of logits of each sample. Saves its inputs and output."""

    @staticmethod
    def forward(x: Tensor, w: Tensor, bias: Any, u: Any, target: Tensor, options: Options) -> Tensor:
        """Compute one tile at a time."""
        return evaluated(_value_rule(options), (x, w, bias, u, target, None))[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save inputs and output."""
        *tensors, ctx.options = inputs
        ctx.save_for_backward(*tensors, output)
        ctx.save_for_forward(*tensors, output)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor | None) -> Any:
        """Compute the wanted gradients."""
        wanted = tuple(ctx.needs_input_grad[:3])
        if cotangent is None or not any(wanted):
            return (None,) * 6
        inputs = *_with_lse(ctx.saved_tensors), cotangent
        if torch.compiler.is_compiling():
            found = _gradient(ctx.options, wanted, inputs)
        else:
            found = LinearCrossEntropyGradient.call(*inputs, ctx.options, wanted)
        return (*placed(found, wanted), None, None, None)

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:
        """Compute the tangent by tiles."""
        return _tangent(ctx.options, (*_with_lse(ctx.saved_tensors), *tangents[:3]))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
        """Fold the batch into the samples, or into the dimensions before."""
        *tensors, options = inputs
        found, dims = batched(
            lambda *front: (LinearCrossEntropy.call(*front[:5], options),),
            _value_rule(options),
            info.batch_size,
            (*in_dims[:5], None),
            (*tensors, None),
        )
        return found[0], dims[0]


class LinearCrossEntropyGradient(AnyOrderFunction):
    """The wanted gradients of x, weight and bias. Saves the inputs of the terms and the cotangent."""

    @staticmethod
    def forward(
        x: Tensor,
        w: Tensor,
        bias: Any,
        u: Any,
        target: Tensor,
        lse: Any,
        cotangent: Tensor,
        options: Options,
        wanted: tuple[bool, ...],
    ) -> tuple[Tensor, ...]:
        """Compute one tile at a time."""
        return _gradient(options, wanted, (x, w, bias, u, target, lse, cotangent))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Save the inputs and the gradient of x, which saves products in derivatives."""
        *tensors, ctx.options, ctx.wanted = inputs
        tensors.append(output[0] if ctx.wanted[0] else None)
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        """Use the cotangents as tangents: of the terms for the cotangent, of the gradient for the inputs."""
        if all(each is None for each in cotangents):
            return (None,) * 9
        directions = placed(cotangents, ctx.wanted)
        needed, by_cotangent = tuple(ctx.needs_input_grad[:3]), None
        found: tuple[Any, ...] = ()
        if any(needed):
            with_terms = ctx.needs_input_grad[6]
            tensors, by_x = _with_gradient(ctx.saved_tensors)
            found = _gradient_tangent(ctx.options, needed, with_terms, tensors, directions, None, by_x)
            found, by_cotangent = (found[:-1], found[-1]) if with_terms else (found, None)
        elif ctx.needs_input_grad[6]:
            by_cotangent = _tangent(ctx.options, (*ctx.saved_tensors[:6], *directions))
        return (*placed(found, needed), None, None, None, by_cotangent, None, None)

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor, ...]:
        """Compute the tangent of the gradient by tiles."""
        tensors, by_x = _with_gradient(ctx.saved_tensors)
        return _gradient_tangent(ctx.options, ctx.wanted, False, tensors, tangents[:3], tangents[6], by_x)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
        """Fold the batch into the samples, or into the dimensions before."""
        *tensors, options, wanted = inputs
        return batched(
            lambda *front: LinearCrossEntropyGradient.call(*front, options, wanted),
            _gradient_rule(options, wanted),
            info.batch_size,
            in_dims[:7],
            tensors,
        )


class TiledBlocks(RowBlocks):
    """A rule by tiles, with derivatives by blocks of samples. Saves its inputs."""

    @staticmethod
    def forward(rule: Any, plan: Plan, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        """Compute one tile at a time."""
        del plan
        return evaluated(rule, tensors)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], rule: Any, plan: Plan, *tensors: Tensor | None) -> Any:
        """Fold the batch into the samples, or into the dimensions before."""
        del plan
        return batched(partial(_tiled, TiledBlocks, rule), rule, info.batch_size, in_dims[2:], tensors)


class LinearCrossEntropyTangent(TiledBlocks):
    """The tangent of the terms along x, weight and bias. Saves its inputs."""

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        """Return the gradient for the tangents, and the gradient's tangent for the inputs."""
        (cotangent,) = cotangents
        if cotangent is None:
            return (None,) * 11
        own, directions = ctx.saved_tensors[:6], ctx.saved_tensors[6:]
        (options,) = ctx.formula.settings
        by_inputs, by_tangents = tuple(ctx.needs_input_grad[2:5]), tuple(ctx.needs_input_grad[8:11])
        first: tuple[Any, ...] = ()
        second: tuple[Any, ...] = ()
        if any(by_inputs):
            first = _gradient_tangent(options, by_inputs, False, (*own, cotangent), directions, None)
        if any(by_tangents):
            second = LinearCrossEntropyGradient.call(*own, cotangent, options, by_tangents)
        return (None, None, *placed(first, by_inputs), None, None, None, *placed(second, by_tangents))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], rule: Any, plan: Plan, *tensors: Tensor | None) -> Any:
        """Fold the batch into the samples, or into the dimensions before."""
        del plan
        return batched(partial(_tiled, LinearCrossEntropyTangent, rule), rule, info.batch_size, in_dims[2:], tensors)


def _tiled(function: type[TiledBlocks], rule: Rule, *tensors: Tensor | None) -> tuple[Tensor, ...]:
    return function.call(rule, rule.plan(tensors), *tensors)


def _value_rule(options: Options) -> Rule:
    return Rule(formulas.value, (options,), OWN, (True,), merge=tiles.join_terms, tiled=_value_by_tiles)


def _value_by_tiles(rule: Rule, tensors: Sequence[Any]) -> tuple[Tensor, ...]:
    # Raise torch's own error for a class that is in no tile; on a GPU it comes later.
    (options,), w, target = rule.settings, tensors[1], tensors[4]
    w.new_zeros(()).expand(*w.shape[:-1], 1).gather(-2, class_of(target, options.ignore))
    return by_tiles(rule, tensors)


def _tangent(options: Options, tensors: Sequence[Tensor | None]) -> Tensor:
    return _tiled(
        LinearCrossEntropyTangent, Rule(formulas.tangent, (options,), (*OWN, *DIRECTIONS), (True,)), *tensors
    )[0]


def _gradient_rule(options: Options, wanted: tuple[bool, ...]) -> Rule:
    outputs = chosen(DIRECTIONS, wanted)
    return Rule(formulas.gradient, (options, wanted), (*OWN, True), outputs, gives_x=wanted[0])


def _gradient(options: Options, wanted: tuple[bool, ...], tensors: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    found = evaluated(_gradient_rule(options, wanted), tensors)
    return tuple(in_dtype(each, like.dtype) for each, like in zip(found, chosen(tensors[:3], wanted), strict=True))


def _gradient_tangent(
    options: Options,
    wanted: tuple[bool, ...],
    with_terms: bool,
    tensors: Sequence[Tensor | None],
    directions: Sequence[Tensor | None],
    cotangent_t: Tensor | None,
    by_x: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Compute the tangent of the gradient and, last, of the terms if wanted."""
    rule = gradient_tangents.gradient_tangent_rule(options, wanted, with_terms)
    found = _tiled(TiledBlocks, rule, *tensors, *directions, cotangent_t, by_x)
    like = chosen(tensors[:3], wanted)
    return (*(each.to(other.dtype) for each, other in zip(found, like, strict=False)), *found[len(like) :])


def _with_lse(saved: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Return the inputs and the detached log-sum-exp, which speeds up derivatives but is not their argument."""
    *tensors, terms = saved
    assert terms is not None
    return *tensors, terms[..., :1].detach()


def _with_gradient(saved: Sequence[Tensor | None]) -> tuple[Sequence[Tensor | None], Tensor | None]:
    """Return the inputs and the detached gradient of x, which speeds up derivatives."""
    *tensors, by_x = saved
    return tensors, None if by_x is None else by_x.detach()
