r"""Scaled dot-product attention whose memory is linear in the sequence length, with derivatives of every order.

Everything runs over blocks of query rows and holds the weights of one block at a time; backward, forward mode and
their derivatives compute them again. Because the Hessian of $\langle G, O \rangle$ is symmetric, one formula, the
tangent of the gradient, serves both derivatives of the gradient.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hodiff.errors import InputError
from hodiff.functions import attention_formulas as formulas
from hodiff.functions.any_order import AnyOrderFunction
from hodiff.functions.arguments import require_floating
from hodiff.functions.attention_formulas import Options
from hodiff.functions.autocast import autocast_like_torch
from hodiff.functions.nesting import nestable_jvp
from hodiff.functions.row_blocks import Plan, RowBlocks, all_batched, blockwise


class Attention(AnyOrderFunction):
    """$O = P V$. Saves q, k, v, the mask and the seed of dropout."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, seed: Tensor | None, options: Options) -> Tensor:
        """A block of query rows at a time."""
        inputs = (q, k, v, mask, seed)
        return blockwise(partial(formulas.value, options), _plan(inputs, (True,)), *inputs)[0].to(v.dtype)

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
        if torch.compiler.is_compiling():
            found = _gradient(ctx.options, wanted, tensors, cotangent)
        else:
            found = AttentionGradient.call(*tensors, cotangent, ctx.options, wanted)
        return (*_placed(found, wanted), None, None)

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:
        """The tangent by blocks."""
        tensors = ctx.saved_tensors
        plan = _plan((*tensors, *tangents[:4]), (True,))
        found = RowBlocks.call(partial(formulas.tangent, ctx.options), plan, *tensors, *tangents[:4])
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
        by_inputs = by_cotangent = None
        if any(needed):
            by_inputs = _gradient_tangent(ctx.options, needed, tensors, cotangent, directions, None)
        if ctx.needs_input_grad[5]:
            plan = _plan((*tensors, *directions), (True,))
            (by_cotangent,) = RowBlocks.call(partial(formulas.tangent, ctx.options), plan, *tensors, *directions)
            by_cotangent = by_cotangent.to(cotangent.dtype)
        return (*_placed(by_inputs or (), needed), None, by_cotangent, None, None)

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor, ...]:
        """The tangent of the gradient by blocks."""
        *tensors, cotangent = ctx.saved_tensors
        return _gradient_tangent(ctx.options, ctx.wanted, tensors, cotangent, tangents[:4], tangents[5])

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
        """The batch joins the batch dimensions."""
        *tensors, options, wanted = inputs
        found = AttentionGradient.call(*all_batched(info.batch_size, in_dims[:6], tensors), options, wanted)
        return found, (0,) * len(found)


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
) -> Tensor:
    r"""Scaled dot-product attention, $O = \operatorname{softmax}(s\, Q K^\top + M)\, V$.

    Memory is linear in L and in S at every order: q, k, v and the mask are saved, and the weights are computed again by
    blocks of rows; `torch.compile` plans its own memory instead, which is quadratic above the first order. A row that
    sees no key gives zero, and has zero derivatives. 16-bit inputs are computed in float32.

    Args:
        q: Floating-point tensor (..., L, E).
        k: Tensor (..., S, E); batch dimensions broadcast.
        v: Tensor (..., S, F).
        mask: Tensor that broadcasts with (..., L, S): boolean, True where a query sees a key, or floating-point, added
            to the scores (-inf hides a key) and differentiated.
        scale: Factor s of the scores, $1 / \sqrt{E}$ by default.
        is_causal: Whether query i sees keys 0 to i only, on top of the mask.
        dropout_p: Probability that a weight is dropped; the others are divided by 1 - p.
        generator: Where dropout draws its seed from, once a call; all derivatives of the call drop the same weights.
        enable_gqa: Whether the heads of k and v, dimension -3, are each shared by several consecutive heads of q.

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
    _require_inputs(q, k, v, mask)
    _require_options(scale, dropout_p, generator)
    q, k, v, mask = autocast_like_torch(q, k, v, mask)
    if enable_gqa:
        q, k, v, mask = _grouped_heads(q, k, v, mask)
    _require_batches(q, k, v, mask)
    # Equal ranks, so that a batch of vmap in front of all of them still broadcasts.
    rank = max(each.dim() for each in (q, k, v, mask) if each is not None)
    aligned: Any = (None if each is None else each[(None,) * (rank - each.dim())] for each in (q, k, v, mask))
    q, k, v, mask = aligned
    weights = (q, k) if mask is None else (q, k, mask)
    batch = tuple(torch.broadcast_shapes(*(each.shape[:-2] for each in weights)))
    scale = 1 / math.sqrt(max(q.shape[-1], 1)) if scale is None else scale
    if 0 in {*batch, q.shape[-2], k.shape[-2]}:
        output = (scale * q @ k.mT) @ v
    else:
        seed = _seed(generator, rank, q.device) if dropout_p else None
        output = Attention.call(q, k, v, mask, seed, Options(float(scale), is_causal, float(dropout_p), batch))
    return output.flatten(-4, -3) if enable_gqa else output


def _gradient(options: Options, wanted: tuple[bool, ...], tensors: Any, cotangent: Tensor) -> tuple[Tensor, ...]:
    tensors = (*tensors, cotangent)
    plan = _gradient_plan(tensors, wanted)
    found = blockwise(partial(formulas.gradient, options, wanted), plan, *tensors)
    return _like_inputs(found, tensors, wanted)


def _gradient_tangent(
    options: Options, wanted: tuple[bool, ...], tensors: Any, cotangent: Tensor, tangents: Any, cotangent_t: Any
) -> tuple[Tensor, ...]:
    tensors = (*tensors, cotangent, *tangents, cotangent_t)
    formula = partial(formulas.gradient_tangent, options, wanted)
    found = RowBlocks.call(formula, _gradient_plan(tensors, wanted), *tensors)
    return _like_inputs(found, tensors, wanted)


def _gradient_plan(tensors: Any, wanted: tuple[bool, ...]) -> Plan:
    plan = _plan(tensors, ())
    return plan._replace(outputs=tuple(rows for rows, want in zip(plan.inputs[:4], wanted, strict=True) if want))


def _plan(tensors: Any, outputs: tuple[bool, ...]) -> Plan:
    """Rows for q, its cotangents and tangents, and a mask that has them; keys, values and the seed are shared."""
    q, k, _, mask = tensors[:4]
    mask_has_rows = mask is not None and mask.shape[-2] > 1
    own = (True, False, False, mask_has_rows)
    rest = {5: (), 6: (True,), 9: own, 11: (True, *own, True)}[len(tensors)]
    batch = torch.broadcast_shapes(*(each.shape[:-2] for each in (q, k, mask) if each is not None))
    return Plan(q.shape[-2], math.prod(batch) * k.shape[-2], (*own, False, *rest), outputs)


def _like_inputs(found: tuple[Tensor, ...], tensors: Any, wanted: tuple[bool, ...]) -> tuple[Tensor, ...]:
    chosen = [each for each, want in zip(tensors[:4], wanted, strict=True) if want]
    return tuple(each.to(like.dtype) for each, like in zip(found, chosen, strict=True))


def _placed(found: Any, wanted: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
    remaining = iter(found)
    return tuple(next(remaining) if each else None for each in wanted)


def _seed(generator: torch.Generator | None, rank: int, device: torch.device) -> Tensor:
    source = generator.device if generator is not None else device
    return torch.randint(2**32, (1,) * rank, generator=generator, device=source).to(device)


def _grouped_heads(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Any, ...]:
    """(..., H, L, E) as (..., H_k, H / H_k, L, E), against one head of keys each."""
    if min(q.dim(), k.dim(), v.dim()) < 3 or k.shape[-3] != v.shape[-3] or q.shape[-3] % max(k.shape[-3], 1):
        raise InputError(
            "attention: enable_gqa: expected (..., heads, length, size) with equal heads of k and v that divide "
            f"those of q, got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}."
        )
    heads, shared = q.shape[-3], k.shape[-3]
    q = q.reshape(*q.shape[:-3], shared, heads // shared, *q.shape[-2:])
    if mask is not None and mask.dim() > 2:
        pair = (1, 1) if mask.shape[-3] == 1 else (shared, heads // shared)
        mask = mask.reshape(*mask.shape[:-3], *pair, *mask.shape[-2:])
    return q, k.unsqueeze(-3), v.unsqueeze(-3), mask


def _require_inputs(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> None:
    require_floating("attention", q=q, k=k, v=v)
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if min(q.dim(), k.dim(), v.dim()) < 2 or q.shape[-1] != k.shape[-1] or k.shape[-2] != v.shape[-2]:
        raise InputError(f"attention: expected q (..., L, E), k (..., S, E) and v (..., S, F), got {shapes}.")
    if not q.dtype == k.dtype == v.dtype:
        raise InputError(
            f"attention: expected q, k and v of one dtype, got {q.dtype}, {k.dtype} and {v.dtype}; Tensor.to converts."
        )
    if mask is None:
        return
    if not isinstance(mask, Tensor) or not (mask.dtype == torch.bool or mask.is_floating_point()):
        got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise InputError(
            f"attention: mask: expected a boolean or floating-point tensor, got {got}; mask.bool() converts."
        )
    sizes = (q.shape[-2], k.shape[-2])
    if mask.dim() < 2 or any(m not in {1, n} for m, n in zip(mask.shape[-2:], sizes, strict=True)):
        raise InputError(
            f"attention: mask: expected (..., L, S) with L {sizes[0]} or 1 and S {sizes[1]} or 1, "
            f"got {tuple(mask.shape)}."
        )


def _require_batches(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> None:
    named = {"q": q, "k": k, "v": v, "mask": mask}
    shapes = {name: tuple(each.shape[:-2]) for name, each in named.items() if each is not None}
    try:
        torch.broadcast_shapes(*shapes.values())
    except RuntimeError:
        listing = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise InputError(f"attention: expected batch dimensions that broadcast, got {listing}.") from None


def _require_options(scale: Any, dropout_p: Any, generator: Any) -> None:
    if scale is not None and (isinstance(scale, bool) or not isinstance(scale, (int, float))):
        raise InputError(f"attention: scale: expected a number or None, got {scale!r}; multiply q for a learned scale.")
    if isinstance(dropout_p, bool) or not isinstance(dropout_p, (int, float)) or not 0 <= dropout_p <= 1:
        raise InputError(f"attention: dropout_p: expected a number from 0 to 1, got {dropout_p!r}.")
    if dropout_p and generator is None:
        raise InputError(
            "attention: generator: expected a torch.Generator where dropout_p is not 0, got None; "
            "torch.Generator(device).manual_seed(0) makes one."
        )
