r"""Scaled dot-product attention whose memory is linear in the sequence length, with derivatives of every order.

Everything runs over blocks of query rows and holds the weights of one block at a time; backward, forward mode and
their derivatives compute them again. Because the Hessian of $\langle G, O \rangle$ is symmetric, one formula, the
tangent of the gradient, serves both derivatives of the gradient.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from hodiff.common.options import require_number
from hodiff.common.overriding import overridable
from hodiff.errors import InputError
from hodiff.functions.attention import evaluation
from hodiff.functions.attention.arguments import (
    grouped_heads,
    require_band,
    require_batches,
    require_inputs,
    require_options,
)
from hodiff.functions.attention.options import Band, Corner
from hodiff.functions.attention.plans import gradient_plan, rows_plan
from hodiff.kernels.attention.options import Options
from hodiff.rules.any_order import AnyOrderFunction, in_dtype, traced_by_dynamo
from hodiff.rules.autocast import autocast_like_torch
from hodiff.rules.blockwise import RowBlocks, all_batched, blockwise
from hodiff.rules.nesting import nestable_jvp
from hodiff.torch_internals.dynamo import as_one_node, at_trace_time
from hodiff.torch_internals.transforms import in_transform


class Attention(AnyOrderFunction):
    """$O = P V$. Saves q, k, v, the mask and the seed of dropout."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, seed: Tensor | None, options: Options) -> Tensor:
        """A block of query rows at a time."""
        inputs = (q, k, v, mask, seed)
        return in_dtype(blockwise(evaluation.value(options), rows_plan(inputs, (True,)), *inputs)[0], v.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save the inputs."""
        del output
        *tensors, ctx.options = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor | None) -> Any:
        """One call of the gradient's Function."""
        wanted = tuple(ctx.needs_input_grad[:4])
        if cotangent is None or not any(wanted):
            return (None,) * 6
        tensors = ctx.saved_tensors
        if traced_by_dynamo():
            found = _gradient(ctx.options, wanted, tensors, cotangent)
        else:
            found = AttentionGradient.call(*tensors, cotangent, ctx.options, wanted)
        return (*_placed(found, wanted), None, None)

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:
        """The tangent by blocks."""
        tensors = ctx.saved_tensors
        plan = rows_plan((*tensors, *tangents[:4]), (True,))
        found = RowBlocks.call(evaluation.tangent(ctx.options), plan, *tensors, *tangents[:4])
        return found[0].to(tensors[2].dtype)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[Tensor, int]:
        """The batch joins the batch dimensions."""
        *tensors, options = inputs
        return Attention.call(*all_batched(info.batch_size, in_dims[:5], tensors), options), 0


class AttentionGradient(AnyOrderFunction):
    """Those wanted of the gradients by q, k, v and the mask. Saves the inputs of attention and the cotangent."""

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
        """A block of query rows at a time."""
        return _gradient(options, wanted, (q, k, v, mask, seed), cotangent)

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
        r"""Take the cotangents for tangents: $\dot O$ by the cotangent, the gradient's tangent by the inputs."""
        *tensors, cotangent = ctx.saved_tensors
        if all(each is None for each in cotangents):
            return (None,) * 8
        directions = _placed(cotangents, ctx.wanted)
        needed = tuple(ctx.needs_input_grad[:4])
        by_inputs: list[Tensor] = []
        by_cotangent = None
        if any(needed):
            *by_inputs, by_cotangent = _gradient_tangent(
                ctx.options, needed, tensors, cotangent, directions, None, with_output=ctx.needs_input_grad[5]
            )
        elif ctx.needs_input_grad[5]:
            plan = rows_plan((*tensors, *directions), (True,))
            (by_cotangent,) = RowBlocks.call(evaluation.tangent(ctx.options), plan, *tensors, *directions)
            by_cotangent = by_cotangent.to(cotangent.dtype)
        return (*_placed(by_inputs, needed), None, by_cotangent, None, None)

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor, ...]:
        """The tangent of the gradient by blocks."""
        *tensors, cotangent = ctx.saved_tensors
        return _gradient_tangent(ctx.options, ctx.wanted, tensors, cotangent, tangents[:4], tangents[5])[:-1]

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
        """The batch joins the batch dimensions."""
        *tensors, options, wanted = inputs
        found = AttentionGradient.call(*all_batched(info.batch_size, in_dims[:6], tensors), options, wanted)
        return found, (0,) * len(found)


@overridable
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    scale: float | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    generator: torch.Generator | None = None,
    enable_gqa: bool = False,
    *,
    window: tuple[int | None, int | None] | None = None,
    causal_corner: Corner = "upper-left",
    softcap: float | None = None,
) -> Tensor:
    r"""Scaled dot-product attention, $O = \operatorname{softmax}(s\, Q K^\top + M)\, V$.

    Memory is linear in L and in S at every order: q, k, v and the mask are saved, and the weights are computed again
    by blocks of rows. Only compiled transforms of `torch.func` plan their own memory, quadratic above the first order.
    On a CPU, value, gradient and the tangents of both run in kernels of their own. A row that sees no key gives zero,
    and has zero derivatives. 16-bit inputs are computed in float32.

    Args:
        q: Floating-point tensor (..., L, E).
        k: Tensor (..., S, E); batch dimensions broadcast.
        v: Tensor (..., S, F).
        mask: Tensor that broadcasts with (..., L, S): boolean, True where a query sees a key, or floating-point, added
            to the scores (-inf hides a key) and differentiated.
        scale: Factor s of the scores, $1 / \sqrt{E}$ by default.
        is_causal: Whether a query sees the keys up to its own position only, on top of the mask.
        dropout_p: Probability that a weight is dropped; the others are divided by 1 - p.
        generator: Where dropout draws its seed from, once a call; all derivatives of the call drop the same weights.
        enable_gqa: Whether the heads of k and v, dimension -3, are each shared by several consecutive heads of q.
        window: How many keys before and behind its own position a query sees, None for all; only those cost time.
        causal_corner: Where positions agree: of the first query and key, "upper-left", which is torch's convention, or
            of the last ones, "lower-right", as for queries that continue a cache.
        softcap: Bound c of the scores before the mask, $c \tanh(x / c)$.

    Returns:
        Tensor (..., L, F).

    Raises:
        InputError: If shapes, dtypes or options do not fit.

    Example:
        >>> import torch
        >>> q, k, v = torch.eye(2), torch.zeros(2, 2), torch.tensor([[1.0], [3.0]])
        >>> attention(q, k, v)
        tensor([[2.],
                [2.]])
        >>> attention(q, k, v, is_causal=True)
        tensor([[1.],
                [2.]])

    Source: A. Vaswani et al., "Attention is all you need", 2017, equation 1; M. N. Rabe & C. Staats, "Self-attention
    does not need O(n²) memory", 2021, for the blocks.
    """
    require_options(scale, dropout_p)
    if dropout_p and generator is None:
        raise InputError(
            "attention: generator: expected a torch.Generator where dropout_p is not 0, got None; "
            "torch.Generator(device).manual_seed(0) makes one."
        )
    require_band(window, causal_corner)
    require_number("attention", "softcap", softcap, optional=True, positive=True, finite=True)
    band = Band(is_causal, window, causal_corner)
    return attend(q, k, v, mask, scale, band, dropout_p, generator, enable_gqa, softcap)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float | None,
    band: Band,
    dropout_p: float,
    generator: torch.Generator | None,
    enable_gqa: bool,
    softcap: float | None = None,
) -> Tensor:
    """`attention` that draws the seed of dropout from torch's own generator where none is given."""
    require_options(scale, dropout_p)
    require_inputs(q, k, v, mask)
    q, k, v, mask = autocast_like_torch(q, k, v, mask)
    if enable_gqa:
        q, k, v, mask = grouped_heads(q, k, v, mask)
    require_batches(q, k, v, mask)
    # Equal ranks, so that a batch of vmap in front of all of them still broadcasts.
    rank = max(each.dim() for each in (q, k, v, mask) if each is not None)
    aligned: Any = (None if each is None else each[(None,) * (rank - each.dim())] for each in (q, k, v, mask))
    q, k, v, mask = aligned
    weights = (q, k) if mask is None else (q, k, mask)
    batch = tuple(torch.broadcast_shapes(*(each.shape[:-2] for each in weights)))
    scale = 1 / math.sqrt(max(q.shape[-1], 1)) if scale is None else scale
    # Sizes may be symbols, which have no hash and no order.
    if any(size == 0 for size in (*batch, q.shape[-2], k.shape[-2])):
        output = (scale * q @ k.mT) @ v
    else:
        seed = _seed(generator, rank, q.device) if dropout_p else None
        low, high = band.bounds(q.shape[-2], k.shape[-2])
        cap = None if softcap is None else float(softcap)
        options = Options(float(scale), low, high, cap, float(dropout_p), batch)
        output = _apply(q, k, v, mask, seed, options)
    return output.flatten(-4, -3) if enable_gqa else output


def _apply(*inputs: Any) -> Tensor:
    """The Function; compiled transforms see one node, through which they differentiate as in eager code."""
    if not torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting() or not in_transform():
        return Attention.call(*inputs)
    _make_node()
    *tensors, options = inputs
    # Such a node takes no None.
    numbers = {name: each for name, each in options._asdict().items() if each is not None}
    return _node([each for each in tensors if each is not None], [each is not None for each in tensors], numbers)


def _call(tensors: list[Tensor], given: tuple[bool, ...], numbers: dict[str, Any]) -> Tensor:
    numbers = {**dict.fromkeys(Options._fields), **numbers, "batch": tuple(numbers["batch"])}
    return Attention.call(*_placed(tensors, given), Options(**numbers))


_node: Any = None


@at_trace_time
def _make_node() -> None:
    """Make it when it is first asked for, as dynamo takes a second to load."""
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
    """The tangent of the gradient, and last that of the output if it is asked for, or None."""
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


def _placed(found: Any, wanted: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
    remaining = iter(found)
    return tuple(next(remaining) if each else None for each in wanted)


def _seed(generator: torch.Generator | None, rank: int, device: torch.device) -> Tensor:
    source = generator.device if generator is not None else device
    return torch.randint(2**32, (1,) * rank, generator=generator, device=source).to(device)
