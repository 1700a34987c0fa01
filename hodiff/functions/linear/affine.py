"""Sums and scalings of tensors, with broadcasting reduced back to each argument."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hodiff.common.options import is_number
from hodiff.common.overriding import overridable, overridable_in_trees
from hodiff.common.trees import describe
from hodiff.errors import InputError
from hodiff.functions.activations.rectifiers import Masked
from hodiff.kernels import fused
from hodiff.rules.any_order import AnyOrderFunction
from hodiff.rules.arguments import require_broadcastable, require_floating, require_number_or_floating
from hodiff.rules.elementwise import ElementwiseFunction, batch_in_front
from hodiff.rules.nesting import nestable_jvp


class FusedAddReLU(AnyOrderFunction):
    r"""$\max(x + y, 0)$, and a mask of where it is positive. Saves the mask, one byte per element."""

    @staticmethod
    def forward(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the value and its mask."""
        if x.shape == y.shape and fused.takes(x, y):
            return fused.add_relu(x, y)
        total = torch.relu(x + y)
        return total, (total <= 0).logical_not()  # NaN passes its derivative on

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Save the mask."""
        mask = output[1]
        ctx.mark_non_differentiable(mask)
        ctx.save_for_backward(mask)
        ctx.save_for_forward(mask)
        ctx.shapes = tuple(each.shape for each in inputs)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor | None, _: Any = None) -> Any:
        """Keep the cotangent where the sum was positive."""
        if cotangent is None:
            return None, None
        (mask,) = ctx.saved_tensors
        kept = Masked.call(cotangent, mask)
        return tuple(
            kept.sum_to_size(shape) if needed else None
            for shape, needed in zip(ctx.shapes, ctx.needs_input_grad, strict=True)
        )

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, x_t: Tensor | None, y_t: Tensor | None) -> Any:
        """Keep the sum of the tangents where the sum was positive."""
        (mask,) = ctx.saved_tensors
        tangent: Any = sum(each for each in (x_t, y_t) if each is not None)
        return Masked.call(tangent, mask), None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Tensor) -> Any:
        """Broadcast batch against batch."""
        del info
        return FusedAddReLU.call(*batch_in_front(in_dims, inputs)), (0, 0)


class WeightedSum(AnyOrderFunction):
    r"""$y = \sum_i w_i x_i$, with `weights[i]` for $w_i$. Saves weights, and terms if weights need a gradient."""

    @staticmethod
    def forward(weights: Tensor, *terms: Tensor) -> Tensor:
        """Add the terms one by one, without stacking them."""
        total = weights[0] * terms[0]
        for weight, term in zip(weights[1:].unbind(), terms[1:], strict=True):
            total = total + weight * term
        return total

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save what the derivatives read."""
        weights, *terms = inputs
        ctx.save_for_backward(weights, *(terms if ctx.needs_input_grad[0] else ()))
        ctx.save_for_forward(*inputs)
        ctx.shape = output.shape
        ctx.shapes = tuple(term.shape for term in terms)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor | None) -> Any:
        """Compute the gradients, summed to the shapes of their inputs."""
        if cotangent is None:
            return (None,) * (1 + len(ctx.shapes))
        weights, *terms = ctx.saved_tensors
        needs_weights, *needs_terms = ctx.needs_input_grad
        by_weights = None
        if needs_weights:
            by_weights = torch.stack([(cotangent * term).sum_to_size(weights.shape[1:]) for term in terms])
        by_terms = [
            (cotangent * weight).sum_to_size(shape) if needed else None
            for weight, shape, needed in zip(weights.unbind(), ctx.shapes, needs_terms, strict=True)
        ]
        return by_weights, *by_terms

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, weights_t: Tensor | None, *terms_t: Tensor | None) -> Tensor:
        """Apply the product rule."""
        weights, *terms = ctx.saved_tensors
        parts = [] if weights_t is None else [w_t * term for w_t, term in zip(weights_t.unbind(), terms, strict=True)]
        parts += [w * t for w, t in zip(weights.unbind(), terms_t, strict=True) if t is not None]
        tangent = parts[0]
        for part in parts[1:]:
            tangent = tangent + part
        return tangent.expand(ctx.shape)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], weights: Tensor, *terms: Tensor) -> tuple[Tensor, int]:
        """Broadcast batch against batch."""
        del info
        dim, *term_dims = in_dims
        each = weights.unbind() if dim is None else weights.movedim(dim, 0).unbind(1)
        weight_dims = [None if dim is None else 0] * len(each)
        aligned = batch_in_front([*weight_dims, *term_dims], [*each, *terms])
        return WeightedSum.call(torch.stack(aligned[: len(each)]), *aligned[len(each) :]), 0


class ScaleShift(ElementwiseFunction):
    """The Function behind `scale_shift`. Saves input and scale."""

    @staticmethod
    def forward(x: Tensor, weight: Any, bias: Any) -> Tensor:
        """Compute $xw + b$."""
        return (
            torch.addcmul(bias, x, weight)
            if isinstance(bias, Tensor) and isinstance(weight, Tensor)
            else x * weight + bias
        )

    @staticmethod
    def residuals(inputs: Sequence[Any], output: Any) -> Sequence[Any]:
        """Return the two factors."""
        del output
        return inputs[:2]

    @staticmethod
    def slope(index: int, x: Tensor, weight: Any) -> Any:
        """Return the other factor, or 1 for the bias."""
        return (weight, x, 1.0)[index]


@overridable
def fused_add_relu(x: Tensor, y: Tensor) -> Tensor:
    r"""Sum and rectifier of a residual block, $\max(x + y, 0)$ with broadcasting, which saves one byte per element.

    Its derivative where $x + y = 0$ is 0, and all further derivatives are 0.

    Args:
        x: Floating-point tensor of any shape.
        y: Floating-point tensor that broadcasts with `x`.

    Returns:
        Tensor of the broadcast shape.

    Raises:
        InputError: If an argument is invalid.

    Example:
        >>> import torch
        >>> fused_add_relu(torch.tensor([1.0, -3.0]), torch.tensor([1.0, 2.0]))
        tensor([2., 0.])

    Source: K. He et al., "Deep residual learning for image recognition", 2016, figure 2.
    """
    require_floating("fused_add_relu", x=x, y=y)
    require_broadcastable("fused_add_relu", x=x, y=y)
    return FusedAddReLU.call(x, y)[0]


@overridable_in_trees
def weighted_sum(xs: list[Tensor] | tuple[Tensor, ...], ws: Tensor | Sequence[float]) -> Tensor:
    r"""Sum of tensors with weights, $\sum_i w_i x_i$, with broadcasting.

    The terms are never stacked, and saved for backward only if the weights require a gradient.

    Args:
        xs: Floating-point tensors whose shapes broadcast, at least one.
        ws: One number per tensor; a floating-point tensor (len(xs),) of weights, which may require a gradient; or
            (len(xs), ...) where `ws[i]` broadcasts with the terms.

    Returns:
        Tensor of the broadcast shape.

    Raises:
        InputError: If an argument is invalid.

    Example:
        >>> import torch
        >>> weighted_sum([torch.ones(2), torch.tensor([1.0, 2.0])], [1.0, 0.5])
        tensor([1.5000, 2.0000])

    Source: H. Liu, K. Simonyan & Y. Yang, "DARTS: differentiable architecture search", 2019, eq. 2 (a mixed operation).
    """
    if not isinstance(xs, list | tuple) or not xs:
        raise InputError(
            f"weighted_sum: xs: expected a list or tuple of at least one tensor, got {type(xs).__name__}; "
            "list(x.unbind()) converts a stacked tensor."
        )
    require_floating("weighted_sum", **{f"xs[{i}]": x for i, x in enumerate(xs)})
    weights: Any = _numbers(ws, xs) if isinstance(ws, list | tuple) else ws
    require_floating("weighted_sum", ws=weights)
    if weights.dim() == 0 or weights.shape[0] != len(xs):
        raise InputError(
            f"weighted_sum: ws: expected {len(xs)} weights in the first dimension, one for each tensor, got shape "
            f"{tuple(weights.shape)}."
        )
    require_broadcastable("weighted_sum", **{f"xs[{i}]": x for i, x in enumerate(xs)}, **{"ws[0]": weights[0]})
    return WeightedSum.call(weights, *xs)


def _numbers(weights: Sequence[Any], terms: Sequence[Tensor]) -> Tensor:
    """Convert numbers to a tensor whose dtype promotes no term."""
    if not all(map(is_number, weights)):
        got = next(each for each in weights if not is_number(each))
        raise InputError(
            f"weighted_sum: ws: expected numbers or one tensor, got {describe(got)} in a {type(weights).__name__}; "
            "torch.stack combines several tensors."
        )
    dtype = terms[0].dtype
    for term in terms[1:]:
        dtype = torch.promote_types(dtype, term.dtype)
    return torch.tensor([float(each) for each in weights], dtype=dtype, device=terms[0].device)


@overridable
def scale_shift(x: Tensor, weight: Tensor | float, bias: Tensor | float) -> Tensor:
    r"""Scale and shift, $x w + b$ elementwise with broadcasting.

    Args:
        x: Floating-point tensor of any shape.
        weight: Number, or floating-point tensor that broadcasts.
        bias: Number, or floating-point tensor that broadcasts.

    Returns:
        Tensor of the broadcast shape.

    Raises:
        InputError: If an argument is invalid.

    Example:
        >>> import torch
        >>> scale_shift(torch.tensor([[1.0, 2.0]]), torch.tensor([[2.0], [3.0]]), 1.0)
        tensor([[3., 5.],
                [4., 7.]])

    Source: E. Perez et al., "FiLM: visual reasoning with a general conditioning layer", 2018, eq. 2.
    """
    require_floating("scale_shift", x=x)
    require_number_or_floating("scale_shift", weight=weight, bias=bias)
    require_broadcastable("scale_shift", x=x, weight=weight, bias=bias)
    return ScaleShift.call(x, weight, bias)
