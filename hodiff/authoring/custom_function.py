"""The `torch.autograd.Function` behind every custom rule, and the interface of the calls that it runs."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd import Function

from hodiff.authoring.closures import watched
from hodiff.authoring.rule_trees import TreeLayout, differentiable, flatten, flatten_like, kind
from hodiff.authoring.signatures import Signature
from hodiff.common.trees import dense
from hodiff.errors import InputError
from hodiff.rules.nesting import nestable_jvp
from hodiff.torch_internals.autograd.batching import any_legacy_batched, call_below_legacy_batch
from hodiff.torch_internals.autograd.differentiation import may_be_differentiated
from hodiff.torch_internals.autograd.wrapped_tensors import without_ended_wrappers
from hodiff.torch_internals.interception import active_function_modes, in_function_modes
from hodiff.torch_internals.tensors import base_of, is_view

Tensors = Sequence[Any]


class RuleCall(ABC):
    """One call of a function with a rule: its static data, and the layout of its arguments and results.

    Attributes:
        signature: How the function's arguments are bound.
        name: Name of the function in messages.
        static: Arguments that are not differentiated.
        layout: Structure of the differentiated arguments; None if they are bare tensors.
        output: Structure of the output, known after `forward`; None if it is one bare tensor.
        transformed: Whether a transform of torch.func was active when the call was made.
        captured: Constants made inside of a transform that the function closes over.
        modes: Function modes, such as corrections, that were active at the call; the rules run in them.
        kept: Positions of the results of `forward` that are saved for backward.
        extra: Number of residuals among the results of `forward`.
        like: Shapes and dtypes of the output's tensors, known after `forward`.
        holds_anywhere: Whether the rules hold at other arguments, so that finite differences can check them.
    """

    __slots__ = (
        *("captured", "extra", "kept", "layout", "like", "modes"),
        *("name", "output", "signature", "static", "transformed"),
    )
    holds_anywhere: ClassVar[bool] = True

    def __init__(self, signature: Signature, static: tuple[Any, ...], layout: TreeLayout | None, transformed: bool):
        self.signature = signature
        self.name = signature.name
        self.static = static
        self.layout = layout
        self.transformed = transformed
        self.modes = active_function_modes()
        self.captured: Sequence[Tensor] = ()
        self.extra = 0
        self.output: TreeLayout | None = None
        self.kept: Sequence[int] = ()
        self.like: list[tuple[torch.Size, torch.dtype]] = []

    @abstractmethod
    def forward(self, leaves: Tensors) -> tuple[Tensor, ...]:
        """Return the tensors of the output, then residuals that are neither inputs nor outputs."""

    @abstractmethod
    def pushforward(self, leaves: Tensors, tangents: Tensors) -> list[Tensor | None]:
        """Return tangents of the output's tensors, linear in `tangents`; None is zero or non-differentiable."""

    @abstractmethod
    def pullback(
        self, leaves: Tensors, kept: Tensors | None, needed: Sequence[bool], cotangents: Tensors
    ) -> list[Tensor | None]:
        """Return cotangents of the leaves; `kept` is None if residuals must be recomputed differentiably."""

    def in_modes(self, rule: Callable[..., Any], *arguments: Any) -> Any:
        """Run a user's rule in the function modes of the call."""
        if self.captured:  # the rule may run after the transform has ended
            with in_function_modes(self.modes):
                return watched(self.name, lambda arguments: rule(*arguments), arguments, self.captured)
        if not self.modes:
            return rule(*arguments)
        with in_function_modes(self.modes):
            return rule(*arguments)

    def all_arguments(self, leaves: Tensors) -> Sequence[Any]:
        """Return all arguments of the user's function, in the order of its signature."""
        arguments = self.arguments(leaves)
        return self.signature.merge(self.static, arguments) if self.static else arguments

    def argument_name(self, leaf: int) -> str:
        """Return the argument and the path in it that hold a leaf, for messages."""
        position, path = (leaf, "") if self.layout is None else self.layout.locate(leaf)
        return f"{self.signature.differentiated_name(position)}{path}"

    def arguments(self, leaves: Tensors) -> tuple[Any, ...]:
        """Rebuild the differentiated arguments from their leaves."""
        return tuple(leaves) if self.layout is None else self.layout.fill(leaves)

    def take_output(self, output: Any) -> list[Tensor]:
        """Record the structure of the output and return its tensors."""
        if isinstance(output, Tensor):
            tensors = [output]
        else:
            tensors, self.output = flatten(output)
            if not tensors:
                raise InputError(f"{self.name}: output: expected at least one tensor, got {type(output).__name__}.")
        self.like = [(each.shape, each.dtype) for each in tensors]
        return tensors

    def give_output(self, tensors: Tensors) -> Any:
        """Rebuild the output in the structure that the user's function returned."""
        return tensors[0] if self.output is None else self.output.fill(tensors)

    def flatten_output_like(self, tree: Any, what: str) -> list[Any]:
        """Return the leaves of a tree with the output's structure that belong to tensors."""
        if self.output is None:
            if tree is None or isinstance(tree, Tensor):
                return [tree]
            raise InputError(f"{self.name}: {what}: expected a tensor, as the function returns, got {kind(tree)}.")
        return self.output.pick(flatten_like(tree, self.output.spec, f"{self.name}: {what}"))

    def tangents_of_output(self, tree: Any) -> list[Tensor | None]:
        """Check and flatten the output tangent that a rule returned."""
        tangents: list[Tensor | None] = []
        for tangent, (shape, dtype) in zip(self.flatten_output_like(tree, "tangent_out"), self.like, strict=True):
            if tangent is not None and not isinstance(tangent, Tensor):
                raise InputError(f"{self.name}: tangent_out: expected a tensor or None, got {kind(tangent)}.")
            if tangent is None or not (dtype.is_floating_point or dtype.is_complex):
                tangents.append(None)
                continue
            if tangent.shape != shape:
                raise InputError(
                    f"{self.name}: tangent_out: expected shape {tuple(shape)}, that of the output, got "
                    f"{tuple(tangent.shape)}; expand it in the rule."
                )
            tangents.append(tangent if tangent.dtype == dtype else tangent.to(dtype))
        return tangents


class CustomFunction(Function):
    """Runs a `RuleCall` under autograd; saves the tensor arguments and the residuals that the call names."""

    @staticmethod
    def forward(call: RuleCall, *leaves: Any) -> tuple[Tensor, ...]:
        """Run the call on detached leaves."""
        constants = tuple([each.detach() for each in leaves])
        results = (
            call.forward(constants)
            if not call.transformed
            else watched(call.name, call.forward, constants, call.captured)
        )
        count = len(call.like)
        # Torch treats an output that shares memory with an argument as a view, and requires a view as its tangent. A
        # part of a larger tensor needs a tangent whose memory is as large.
        return tuple([
            each.clone() if i < count and _shares(each, constants) else each for i, each in enumerate(results)
        ])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Save the leaves, and the residuals that the call names."""
        call, *leaves = inputs
        ctx.call = call
        ctx.save_for_backward(*leaves, *[output[i] for i in call.kept])
        ctx.save_for_forward(*leaves)
        ctx.set_materialize_grads(False)
        count = len(call.like)
        constant = [each for i, each in enumerate(output) if i >= count or not differentiable(each)]
        if constant:
            ctx.mark_non_differentiable(*constant)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        """Pull back; use saved residuals only if nothing outside may differentiate them."""
        call, needed = ctx.call, ctx.needs_input_grad[1:]
        if all(each is None for each in cotangents):
            return (None,) * (len(needed) + 1)
        # A pullback that runs after its transform has ended receives wrappers that other transforms reject.
        seeds = [_alive(each) for each in cotangents[: len(call.like)]]
        saved, count = [_alive(each) for each in ctx.saved_tensors], len(needed)
        leaves, kept = saved[:count], None
        if not may_be_differentiated():
            leaves, kept = [each.detach() for each in leaves], saved[count:]
        if any_legacy_batched(seeds):
            return (None, *call_below_legacy_batch(lambda *seeds: call.pullback(leaves, kept, needed, seeds), seeds))
        return (None, *call.pullback(leaves, kept, needed, seeds))

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, _: Any, *tangents: Any) -> tuple[Tensor | None, ...]:
        """Push tangents forward."""
        call, leaves = ctx.call, ctx.saved_tensors
        if any_legacy_batched(tangents):
            found = call_below_legacy_batch(lambda *tangents: call.pushforward(leaves, tangents), tangents)
        else:
            found = call.pushforward(leaves, tangents)
        # Torch accepts None only as the tangent of a non-differentiable output.
        dense = [
            leaves[0].new_zeros(shape, dtype=dtype)
            if each is None and (dtype.is_floating_point or dtype.is_complex)
            else each
            for each, (shape, dtype) in zip(found, call.like, strict=True)
        ]
        return (*dense, *(None,) * call.extra)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], call: RuleCall, *leaves: Any) -> tuple[Any, int]:
        """Run the call once for the whole batch; outputs have the batch in front."""
        return CustomFunction.apply(BatchedRuleCall(call, in_dims[1:], info.randomness), *leaves), 0


# Function.apply binds the arguments to forward's signature anew at each call, which costs more than a small operator.
_apply = super(Function, CustomFunction).apply


def apply(call: RuleCall, leaves: Tensors) -> tuple[Tensor, ...]:
    """Run a call differentiably; return the tensors of the output, then residuals."""
    if any_legacy_batched(leaves):
        batched: tuple[Tensor, ...] = call_below_legacy_batch(partial(CustomFunction.apply, call), leaves)
        return batched
    if call.transformed:
        return CustomFunction.apply(call, *leaves)
    return _apply(call, *[_alive(each) for each in leaves])


class BatchedRuleCall(RuleCall):
    """A `RuleCall` for every element of a batch, by `vmap`."""

    __slots__ = ("in_dims", "inner", "over")

    def __init__(self, inner: RuleCall, in_dims: tuple[int | None, ...], randomness: str):
        super().__init__(inner.signature, inner.static, inner.layout, inner.transformed)
        self.captured = inner.captured
        self.inner = inner
        self.in_dims = in_dims
        self.over = partial(torch.func.vmap, randomness=randomness)

    def forward(self, leaves: Tensors) -> tuple[Tensor, ...]:
        """Return outputs and residuals with the batch in front."""
        results = self.over(lambda leaves: tuple(self.inner.forward(leaves)), in_dims=(self.in_dims,))(tuple(leaves))
        # `vmap` expands an unbatched result. Make it dense, because forward mode gives its tangent the same layout.
        results = tuple(map(dense, results))
        self.output, self.kept, self.extra = self.inner.output, self.inner.kept, self.inner.extra
        self.like = [(each.shape, each.dtype) for each in results[: len(self.inner.like)]]
        return results

    def pushforward(self, leaves: Tensors, tangents: Tensors) -> list[Tensor | None]:
        """Push forward over the batch; tangents are batched like their primals."""
        moving = _where(tangents)
        return self._over_some(
            lambda leaves, tangents: self.inner.pushforward(leaves, _spread(tangents, moving)),
            (tuple(leaves), tuple(each for each in tangents if each is not None)),
            (self.in_dims, tuple(dim for dim, i in zip(self.in_dims, moving, strict=True) if i is not None)),
        )

    def pullback(
        self, leaves: Tensors, kept: Tensors | None, needed: Sequence[bool], cotangents: Tensors
    ) -> list[Tensor | None]:
        """Pull back over the batch; sum the cotangents of unbatched arguments."""
        given = _where(cotangents)
        seeds = tuple(each for each in cotangents if each is not None)
        found = self._over_some(
            lambda leaves, kept_, seeds: self.inner.pullback(
                leaves, None if kept is None else kept_, needed, _spread(seeds, given)
            ),
            (tuple(leaves), tuple(kept or ()), seeds),
            (self.in_dims, (0,) * len(kept or ()), (0,) * len(seeds)),
        )
        return [
            each if each is None else each.sum(0) if dim is None else each.movedim(0, dim)
            for each, dim in zip(found, self.in_dims, strict=True)
        ]

    def _over_some(self, function: Any, arguments: tuple[Any, ...], in_dims: tuple[Any, ...]) -> list[Tensor | None]:
        """Batch a function that may return None instead of a tensor, which vmap rejects."""
        found: list[int | None] = []

        def present(*arguments: Any) -> tuple[Tensor, ...]:
            results = function(*arguments)
            found.extend(_where(results))
            return tuple(each for each in results if each is not None)

        return _spread(self.over(present, in_dims=in_dims)(*arguments), found)


def _alive(tensor: Tensor | None) -> Any:
    return None if tensor is None else without_ended_wrappers(tensor)


def _where(values: Sequence[Any]) -> list[int | None]:
    """Index of every value among the values that are not None; None for None."""
    count = itertools.count()
    return [None if each is None else next(count) for each in values]


def _spread(values: Sequence[Any], where: Sequence[int | None]) -> list[Any]:
    return [None if i is None else values[i] for i in where]


def _shares(result: Tensor, arguments: Sequence[Tensor]) -> bool:
    """Whether a result shares memory with an argument, or is a part of a larger tensor."""
    if any(result is each for each in arguments):
        return True
    if not is_view(result):
        return False
    base = base_of(result)
    is_part = base is not None and (base.numel() != result.numel() or base.dtype != result.dtype)
    return is_part or any(base is each for each in arguments)
