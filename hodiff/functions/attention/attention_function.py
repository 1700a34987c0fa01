r"""The Functions of attention: its value, its gradient and its tangent, with derivatives of every order.

Because the Hessian of $\langle G, O \rangle$ is symmetric, one formula, the tangent of the gradient, serves both
derivatives of the gradient, and backward of the tangent.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hodiff.functions.attention import evaluation
from hodiff.functions.attention.attention_arguments import gradient_plan, rows_plan
from hodiff.kernels.attention.options import Options
from hodiff.rules.any_order import in_dtype, traced_by_dynamo
from hodiff.rules.blockwise import RowBlocks, all_batched, blockwise, pushed
from hodiff.rules.nesting import nestable_jvp
from hodiff.rules.saving import SavingFunction, placed
from hodiff.torch_internals.autograd.transforms import in_transform
from hodiff.torch_internals.compilers.dynamo import as_one_node, at_trace_time


class Attention(SavingFunction):
    """$O = P V$. Saves q, k, v, the mask and the seed of dropout."""

    saves = 5

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, seed: Tensor | None, options: Options) -> Tensor:
        """Compute one block of query rows at a time."""
        inputs = (q, k, v, mask, seed)
        return in_dtype(blockwise(evaluation.value(options), rows_plan(inputs, (True,)), *inputs)[0], v.dtype)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor | None) -> Any:
        """Compute the wanted gradients."""
        wanted = tuple(ctx.needs_input_grad[:4])
        if cotangent is None or not any(wanted):
            return (None,) * 6
        tensors = ctx.saved_tensors
        (options,) = ctx.rest
        if traced_by_dynamo():
            found = _gradient(options, wanted, tensors, cotangent)
        else:
            found = AttentionGradient.call(*tensors, cotangent, options, wanted)
        return (*placed(found, wanted), None, None)

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:
        """Compute the tangent by blocks."""
        return AttentionTangent.call(*ctx.saved_tensors, *tangents[:4], *ctx.rest)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[Tensor, int]:
        """Move the batch in front of the batch dimensions."""
        *tensors, options = inputs
        return Attention.call(*all_batched(info.batch_size, in_dims[:5], tensors), options), 0


class AttentionGradient(SavingFunction):
    """The wanted gradients of q, k, v and the mask. Saves the inputs of attention and the cotangent."""

    saves = 6

    @staticmethod
    def forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        seed: Tensor | None,
        cotangent: Tensor,
        options: Options,
        wanted: tuple[bool, ...],
    ) -> tuple[Tensor, ...]:
        """Compute one block of query rows at a time."""
        return _gradient(options, wanted, (q, k, v, mask, seed), cotangent)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        r"""Use the cotangents as tangents: $\dot O$ for the cotangent, the gradient's tangent for the inputs."""
        *tensors, cotangent = ctx.saved_tensors
        options, wanted = ctx.rest
        if all(each is None for each in cotangents):
            return (None,) * 8
        directions = placed(cotangents, wanted)
        needed = tuple(ctx.needs_input_grad[:4])
        by_inputs: list[Tensor] = []
        by_cotangent = None
        if any(needed):
            *by_inputs, by_cotangent = _gradient_tangent(
                options, needed, tensors, cotangent, directions, None, with_output=ctx.needs_input_grad[5]
            )
        elif ctx.needs_input_grad[5]:
            by_cotangent = AttentionTangent.call(*tensors, *directions, options).to(cotangent.dtype)
        return (*placed(by_inputs, needed), None, by_cotangent, None, None)

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor, ...]:
        """Compute the tangent of the gradient by blocks."""
        *tensors, cotangent = ctx.saved_tensors
        options, wanted = ctx.rest
        return _gradient_tangent(options, wanted, tensors, cotangent, tangents[:4], tangents[5])[:-1]

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
        """Move the batch in front of the batch dimensions."""
        *tensors, options, wanted = inputs
        found = AttentionGradient.call(*all_batched(info.batch_size, in_dims[:6], tensors), options, wanted)
        return found, (0,) * len(found)


class AttentionTangent(SavingFunction):
    r"""$\dot O$ for tangents of q, k, v and the mask; None is zero. Saves the inputs and the tangents."""

    saves = 9

    @staticmethod
    def forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        seed: Tensor | None,
        q_t: Tensor | None,
        k_t: Tensor | None,
        v_t: Tensor | None,
        mask_t: Tensor | None,
        options: Options,
    ) -> Tensor:
        """Compute one block of query rows at a time."""
        tensors = (q, k, v, mask, seed, q_t, k_t, v_t, mask_t)
        return in_dtype(blockwise(evaluation.tangent(options), rows_plan(tensors, (True,)), *tensors)[0], v.dtype)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor | None) -> Any:
        """Return the gradient's tangent for the inputs, and the gradient for the tangents."""
        tensors, tangents = ctx.saved_tensors[:5], ctx.saved_tensors[5:]
        by_inputs, by_tangents = tuple(ctx.needs_input_grad[:4]), tuple(ctx.needs_input_grad[5:9])
        (options,) = ctx.rest
        moved: Any = ()
        pulled: Any = ()
        if cotangent is None:
            return (None,) * 10
        if any(by_inputs):
            moved = _gradient_tangent(options, by_inputs, tensors, cotangent, tangents, None)[:-1]
        if any(by_tangents):
            if traced_by_dynamo():
                pulled = _gradient(options, by_tangents, tensors, cotangent)
            else:
                pulled = AttentionGradient.call(*tensors, cotangent, options, by_tangents)
        return (*placed(moved, by_inputs), None, *placed(pulled, by_tangents), None)

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:
        """Compute the tangent of the formula by blocks."""
        tensors = ctx.saved_tensors
        (options,) = ctx.rest
        found = pushed(evaluation.tangent(options), rows_plan(tensors, (True,)), tensors, tangents[:9])
        return found[0].to(tensors[2].dtype)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[Tensor, int]:
        """Move the batch in front of the batch dimensions."""
        *tensors, options = inputs
        return AttentionTangent.call(*all_batched(info.batch_size, in_dims[:9], tensors), options), 0


def apply(*inputs: Any) -> Tensor:
    """Apply the Function; compiled transforms see one node, and differentiate it as in eager code."""
    if not torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting() or not in_transform():
        return Attention.call(*inputs)
    _make_node()
    *tensors, options = inputs
    # Such a node accepts no None.
    numbers = {name: each for name, each in options._asdict().items() if each is not None}
    return _node([each for each in tensors if each is not None], [each is not None for each in tensors], numbers)


def _call(tensors: list[Tensor], given: tuple[bool, ...], numbers: dict[str, Any]) -> Tensor:
    numbers = {**dict.fromkeys(Options._fields), **numbers, "batch": tuple(numbers["batch"])}
    return Attention.call(*placed(tensors, given), Options(**numbers))


_node: Any = None


@at_trace_time
def _make_node() -> None:
    """Create the node at its first use, because dynamo takes a second to load."""
    global _node
    _node = _node or as_one_node(_call)


def _gradient(options: Options, wanted: tuple[bool, ...], tensors: Any, cotangent: Tensor) -> tuple[Tensor, ...]:
    tensors = (*tensors, cotangent)
    plan = gradient_plan(tensors, wanted)
    found = blockwise(evaluation.gradient(options, wanted), plan, *tensors)
    return _like_inputs(found, tensors, wanted)


def _gradient_tangent(
    options: Options,
    wanted: tuple[bool, ...],
    tensors: Any,
    cotangent: Tensor,
    tangents: Any,
    cotangent_t: Any,
    *,
    with_output: bool = False,
) -> tuple[Any, ...]:
    """Compute the tangent of the gradient and, last, of the output if wanted, else None."""
    tensors = (*tensors, cotangent, *tangents, cotangent_t)
    formula = evaluation.gradient_tangent(options, wanted, with_output)
    plan = gradient_plan(tensors, wanted)
    if with_output:
        *found, output = RowBlocks.call(formula, plan._replace(outputs=(*plan.outputs, True)), *tensors)
        return (*_like_inputs(tuple(found), tensors, wanted), output.to(cotangent.dtype))
    return (*_like_inputs(RowBlocks.call(formula, plan, *tensors), tensors, wanted), None)


def _like_inputs(found: tuple[Tensor, ...], tensors: Any, wanted: tuple[bool, ...]) -> tuple[Tensor, ...]:
    chosen = [each for each, want in zip(tensors[:4], wanted, strict=True) if want]
    return tuple(in_dtype(each, like.dtype) for each, like in zip(found, chosen, strict=True))
