r"""The terms of a cross-entropy of linear logits as a Function, with derivatives of every order, by tiles of logits.

Backward and forward mode compute logits again. Because the Hessian of $\langle \gamma, L \rangle$ is symmetric, one
formula, the tangent of the gradient, serves both derivatives of the gradient, and that of the tangent. Derivatives of
it go by blocks of samples.

With x, weight and bias moving, the products of matrices of the size of all logits are 1 for the value, 3 for the
gradient, 3 for the tangent of the value and 10 for that of the gradient: 3 for the tangent of the log-sum-exp, which
each tile wants complete, and then 7.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hodiff.functions.losses.cross_entropy import class_of
from hodiff.functions.losses.linear_terms import formulas, tiles
from hodiff.functions.losses.linear_terms.formulas import Options
from hodiff.rules.any_order import AnyOrderFunction, in_dtype
from hodiff.rules.blockwise import Plan, RowBlocks, all_batched, blockwise
from hodiff.rules.nesting import nestable_jvp
from hodiff.rules.tensor_blocks import allows_in_place

# Whether x, weight, bias, class weights, target and log-sum-exp have samples, not classes.
OWN = (True, False, False, False, True, True)
DIRECTIONS = (True, False, False)


class Rule(NamedTuple):
    """A formula with what it is bound to.

    Attributes:
        formula: Of `formulas`.
        settings: Its first arguments.
        inputs: Whether each tensor has samples.
        outputs: Whether each result has.
        merge: Adds up results of several classes.
    """

    formula: Any
    settings: tuple[Any, ...]
    inputs: tuple[bool, ...]
    outputs: tuple[bool, ...]
    merge: tiles.Merge = tiles.add

    def __call__(self, start: int, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        """The results of some samples and all classes, whose log-sum-exp is not given but differentiated."""
        del start
        with _without_autocast(tensors[1]):
            return self.formula(*self.settings, None, *tensors[:5], None, *tensors[6:])

    def plan(self, tensors: Sequence[Tensor | None]) -> Plan:
        """Blocks of samples."""
        x, w = tensors[:2]
        assert x is not None
        assert w is not None
        return Plan(x.shape[-2], math.prod(x.shape[:-2]) * w.shape[-2], self.inputs, self.outputs)


class LinearCrossEntropy(AnyOrderFunction):
    """Log-sum-exp, logit of the target and weighted sum of logits of each sample. Saves its inputs and output."""

    @staticmethod
    def forward(x: Tensor, w: Tensor, bias: Any, u: Any, target: Tensor, options: Options) -> Tensor:
        """A tile at a time."""
        return _evaluated(_value_rule(options), (x, w, bias, u, target, None))[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save inputs and output."""
        *tensors, ctx.options = inputs
        ctx.save_for_backward(*tensors, output)
        ctx.save_for_forward(*tensors, output)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor | None) -> Any:
        """One call of the gradient's Function."""
        wanted = tuple(ctx.needs_input_grad[:3])
        if cotangent is None or not any(wanted):
            return (None,) * 6
        inputs = *_with_lse(ctx.saved_tensors), cotangent
        if torch.compiler.is_compiling():
            found = _gradient(ctx.options, wanted, inputs)
        else:
            found = LinearCrossEntropyGradient.call(*inputs, ctx.options, wanted)
        return (*_placed(found, wanted), None, None, None)

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:
        """The tangent by tiles."""
        return _tangent(ctx.options, (*_with_lse(ctx.saved_tensors), *tangents[:3]))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
        """The batch joins the samples, or the dimensions before."""
        *tensors, options = inputs
        found, dims = _batched(
            lambda *front: (LinearCrossEntropy.call(*front[:5], options),),
            _value_rule(options),
            info.batch_size,
            (*in_dims[:5], None),
            (*tensors, None),
        )
        return found[0], dims[0]


class LinearCrossEntropyGradient(AnyOrderFunction):
    """Those wanted of the gradients by x, weight and bias. Saves the inputs of the terms and the cotangent."""

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
        """A tile at a time."""
        return _gradient(options, wanted, (x, w, bias, u, target, lse, cotangent))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Save the inputs."""
        del output
        *tensors, ctx.options, ctx.wanted = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        """Take the cotangents for tangents: of the terms, by the cotangent, and of the gradient, by the inputs."""
        if all(each is None for each in cotangents):
            return (None,) * 9
        directions = _placed(cotangents, ctx.wanted)
        needed, by_cotangent = tuple(ctx.needs_input_grad[:3]), None
        found: tuple[Any, ...] = ()
        if any(needed):
            with_terms = ctx.needs_input_grad[6]
            found = _gradient_tangent(ctx.options, needed, with_terms, ctx.saved_tensors, directions, None)
            found, by_cotangent = (found[:-1], found[-1]) if with_terms else (found, None)
        elif ctx.needs_input_grad[6]:
            by_cotangent = _tangent(ctx.options, (*ctx.saved_tensors[:6], *directions))
        return (*_placed(found, needed), None, None, None, by_cotangent, None, None)

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor, ...]:
        """The tangent of the gradient by tiles."""
        return _gradient_tangent(ctx.options, ctx.wanted, False, ctx.saved_tensors, tangents[:3], tangents[6])

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
        """The batch joins the samples, or the dimensions before."""
        *tensors, options, wanted = inputs
        return _batched(
            lambda *front: LinearCrossEntropyGradient.call(*front, options, wanted),
            _gradient_rule(options, wanted),
            info.batch_size,
            in_dims[:7],
            tensors,
        )


class TiledBlocks(RowBlocks):
    """A rule by tiles, with derivatives by blocks of samples. Saves its inputs."""

    @staticmethod
    def forward(rule: Rule, plan: Plan, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        """A tile at a time."""
        del plan
        return _evaluated(rule, tensors)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], rule: Rule, plan: Plan, *tensors: Tensor | None) -> Any:
        """The batch joins the samples, or the dimensions before."""
        del plan
        return _batched(partial(_tiled, TiledBlocks, rule), rule, info.batch_size, in_dims[2:], tensors)


class LinearCrossEntropyTangent(TiledBlocks):
    """The tangent of the terms along x, weight and bias. Saves its inputs."""

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor | None) -> Any:
        """The gradient by the tangents, and its tangent by the inputs."""
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
        return (None, None, *_placed(first, by_inputs), None, None, None, *_placed(second, by_tangents))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], rule: Rule, plan: Plan, *tensors: Tensor | None) -> Any:
        """The batch joins the samples, or the dimensions before."""
        del plan
        return _batched(partial(_tiled, LinearCrossEntropyTangent, rule), rule, info.batch_size, in_dims[2:], tensors)


def _tiled(function: type[TiledBlocks], rule: Rule, *tensors: Tensor | None) -> tuple[Tensor, ...]:
    return function.call(rule, rule.plan(tensors), *tensors)


def _value_rule(options: Options) -> Rule:
    return Rule(formulas.value, (options,), OWN, (True,), tiles.join_terms)


def _tangent(options: Options, tensors: Sequence[Tensor | None]) -> Tensor:
    return _tiled(
        LinearCrossEntropyTangent, Rule(formulas.tangent, (options,), (*OWN, *DIRECTIONS), (True,)), *tensors
    )[0]


def _gradient_rule(options: Options, wanted: tuple[bool, ...]) -> Rule:
    return Rule(formulas.gradient, (options, wanted), (*OWN, True), _chosen(DIRECTIONS, wanted))


def _gradient(options: Options, wanted: tuple[bool, ...], tensors: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    found = _evaluated(_gradient_rule(options, wanted), tensors)
    return tuple(in_dtype(each, like.dtype) for each, like in zip(found, _chosen(tensors[:3], wanted), strict=True))


def _gradient_tangent(
    options: Options,
    wanted: tuple[bool, ...],
    with_terms: bool,
    tensors: Sequence[Tensor | None],
    directions: Sequence[Tensor | None],
    cotangent_t: Tensor | None,
) -> tuple[Tensor, ...]:
    """The tangent of the gradient, and last that of the terms if it is asked for."""
    outputs = (*_chosen(DIRECTIONS, wanted), *((True,) if with_terms else ()))
    rule = Rule(formulas.gradient_tangent, (options, wanted, with_terms), (*OWN, True, *DIRECTIONS, True), outputs)
    found = _tiled(TiledBlocks, rule, *tensors, *directions, cotangent_t)
    like = _chosen(tensors[:3], wanted)
    return (*(each.to(other.dtype) for each, other in zip(found, like, strict=False)), *found[len(like) :])


def _evaluated(rule: Rule, tensors: Sequence[Any]) -> tuple[Tensor, ...]:
    """The results of a rule, by tiles where there are several."""
    plan, given = rule.plan(tensors), [each for each in tensors if each is not None]
    # Sizes may be symbols where code is compiled, which plans its own memory.
    if not allows_in_place(*given):
        return rule(0, *tensors) if torch.compiler.is_compiling() else blockwise(rule, plan, *tensors)
    if plan.length * plan.width <= tiles.WHOLE:
        return rule(0, *tensors)
    if rule.formula is formulas.gradient_tangent:
        return _gradient_tangent_by_tiles(rule, tensors)
    if rule.formula is formulas.value:
        _require_classes(rule.settings[0], tensors[1], tensors[4])
    return _by_tiles(rule, tensors)


def _by_tiles(rule: Rule, tensors: Sequence[Any]) -> tuple[Tensor, ...]:
    formula, dtype = partial(rule.formula, *rule.settings), tensors[1].dtype
    with _without_autocast(tensors[1]):
        return tiles.tilewise(formula, rule.inputs, rule.outputs, tensors, rule.merge, dtype)


def _without_autocast(tensor: Any) -> Any:
    """Inputs were lowered in front of the Function; what is computed from them stays wide."""
    device = tensor.device.type
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def _require_classes(options: Options, w: Tensor, target: Tensor) -> None:
    """Torch's own error for a class that is in no tile; on a GPU it comes later."""
    w.new_zeros(()).expand(*w.shape[:-1], 1).gather(-2, class_of(target, options.ignore))


def _gradient_tangent_by_tiles(rule: Rule, tensors: Sequence[Any]) -> tuple[Tensor, ...]:
    """Each tile wants the tangent of the log-sum-exp, which comes of all classes."""
    options, wanted, with_terms = rule.settings
    own, directions = tensors[:6], tensors[7:10]
    lse_t: Any = None
    if any(each is not None for each in directions):
        tangent = Rule(formulas.tangent, (options,), (*OWN, *DIRECTIONS), (True,))
        (terms_t,) = _by_tiles(tangent, (*own, *directions))
        lse_t = terms_t[..., :1]
    outputs = _chosen(DIRECTIONS, wanted)
    second = Rule(rule.formula, (options, wanted, False), (*rule.inputs, True), outputs)
    found = _by_tiles(second, (*tensors, lse_t))
    return (*found, terms_t) if with_terms else found


def _batched(function: Any, rule: Rule, size: int, in_dims: Sequence[Any], tensors: Sequence[Any]) -> Any:
    """A batch joins the samples where no classes are batched nor summed over, or else the dimensions before."""
    joins = all(rule.outputs) and all(
        dim is None or has_samples for dim, has_samples in zip(in_dims, rule.inputs, strict=True)
    )
    if not joins:
        found = function(*all_batched(size, in_dims, tensors))
        return found, (0,) * len(found)
    front = all_batched(size, in_dims, tensors)
    joined = [
        new.movedim(0, -3).flatten(-3, -2) if has_samples and new is not None else each
        for new, each, has_samples in zip(front, tensors, rule.inputs, strict=True)
    ]
    found = tuple(each.unflatten(-2, (size, -1)).movedim(-3, 0) for each in function(*joined))
    return found, (0,) * len(found)


def _with_lse(saved: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """The inputs, and the log-sum-exp, which helps to compute derivatives and is none of their arguments."""
    *tensors, terms = saved
    assert terms is not None
    return *tensors, terms[..., :1].detach()


def _placed(found: Any, wanted: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
    remaining = iter(found)
    return tuple(next(remaining) if each else None for each in wanted)


def _chosen(values: Sequence[Any], wanted: tuple[bool, ...]) -> tuple[Any, ...]:
    return tuple(each for each, want in zip(values, wanted, strict=True) if want)
