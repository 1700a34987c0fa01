"""Linear layers that save less for backward than torch's operators, or clamp their gradients."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from hodiff.common.options import require_choice, require_number
from hodiff.common.overriding import overridable
from hodiff.errors import InputError
from hodiff.functions.linear.activations import FUSED_ACTIVATIONS
from hodiff.recompute.intermediates import can_forget, forget_between
from hodiff.rules.any_order import AnyOrderFunction
from hodiff.rules.arguments import require_floating, require_one_dtype
from hodiff.rules.autocast import autocast_like_torch
from hodiff.rules.blockwise import all_batched
from hodiff.rules.nesting import nestable_jvp
from hodiff.rules.saving import SavingFunction


class FusedLinear(AnyOrderFunction):
    """$y = a(x w^T + b)$. Saves input and weight, with the output (relu, tanh) or the bias (silu, gelu).

    In addition to the shapes of `fused_linear`, it takes stacks that broadcast, for batches of weights: x (*stack, n,
    in), w (*stack, out, in) and b (*stack, out).
    """

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
        """Compute the output; the pre-activation is freed at the end of this call."""
        return FUSED_ACTIVATIONS[activation].value(_affine(x, weight, bias))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save the factors and what the activation's derivative needs."""
        x, weight, bias, ctx.activation = inputs
        ctx.save_for_backward(x, weight, output if FUSED_ACTIVATIONS[ctx.activation].from_output else bias)
        ctx.save_for_forward(x, weight, bias)
        ctx.bias_shape = None if bias is None else bias.shape
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor | None) -> Any:
        """Apply the activation's derivative, then the products; silu and gelu recompute the pre-activation."""
        if cotangent is None:
            return None, None, None, None
        x, weight, rest = ctx.saved_tensors
        activation = FUSED_ACTIVATIONS[ctx.activation]
        residual = rest if activation.from_output else _affine(x, weight, rest)
        cotangent = activation.scaled(cotangent, residual)
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        return (
            (cotangent @ weight).sum_to_size(x.shape) if needs_x else None,
            _weight_gradient(cotangent, x, weight) if needs_weight else None,
            _bias_gradient(cotangent, ctx.bias_shape) if needs_bias else None,
            None,
        )

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, x_t: Tensor | None, weight_t: Tensor | None, bias_t: Tensor | None, _: None) -> Tensor:
        """Apply the product rule, then the activation's derivative at the recomputed pre-activation."""
        x, weight, bias = ctx.saved_tensors
        activation = FUSED_ACTIVATIONS[ctx.activation]
        z = _affine(x, weight, bias)
        terms = []
        if x_t is not None:
            terms.append(_affine(x_t, weight, None))
        if weight_t is not None:
            terms.append(_affine(x, weight_t, None))
        if bias_t is not None:
            terms.append((bias_t if bias_t.dim() == 1 else bias_t.unsqueeze(-2)).expand(z.shape))
        tangent = sum(terms[1:], terms[0])
        return activation.scaled(tangent, activation.value(z) if activation.from_output else z)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], x: Tensor, weight: Tensor, bias: Tensor | None, activation: str
    ) -> tuple[Tensor, int]:
        """Fold the batch into the rows of the input, or make a stack."""
        x_dim, weight_dim, bias_dim, _ = in_dims
        stacked = weight.dim() - (weight_dim is not None) > 2
        if not stacked and weight_dim is None and bias_dim is None:
            return FusedLinear.call(x.movedim(x_dim, 0), weight, bias, activation), 0
        x, weight = _in_front(x, x_dim), _in_front(weight, weight_dim)
        bias = None if bias is None else _in_front(bias, bias_dim)
        if stacked:
            return FusedLinear.call(x, weight, bias, activation), 0
        y = FusedLinear.call(_rows(x), weight, bias, activation)
        return y.reshape(info.batch_size, *x.shape[1:-1], y.shape[-1]), 0


class ClippedGradientLinear(SavingFunction):
    """$y = x w^T$ with clamped gradients with respect to $x$ and $w$. Saves both.

    It takes stacks like `FusedLinear`, but of equal shapes: unbatched inputs are expanded outside, because the gradient
    of each example is clamped before the sum.
    """

    saves = 2

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bound: float) -> Tensor:
        """Compute the exact product."""
        del bound
        return _affine(x, weight, None)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor | None) -> Any:
        """Compute the exact gradients, and clamp them elementwise."""
        if cotangent is None:
            return None, None, None
        x, weight = ctx.saved_tensors
        (bound,) = ctx.rest
        needs_x, needs_weight, _ = ctx.needs_input_grad
        return (
            (cotangent @ weight).clamp(-bound, bound) if needs_x else None,
            _weight_gradient(cotangent, x, weight).clamp(-bound, bound) if needs_weight else None,
            None,
        )

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, x_t: Tensor | None, weight_t: Tensor | None, _: None) -> Tensor:
        """Apply the product rule of the exact map: a tangent has no gradient to clamp."""
        x, weight = ctx.saved_tensors
        terms = [] if x_t is None else [_affine(x_t, weight, None)]
        terms += [] if weight_t is None else [_affine(x, weight_t, None)]
        return terms[0] if len(terms) == 1 else terms[0] + terms[1]

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, weight: Tensor, bound: float) -> tuple[Tensor, int]:
        """Turn the batch into a stack."""
        stacked = weight.dim() - (in_dims[1] is not None) > 2
        x, weight = all_batched(info.batch_size, in_dims[:2], (x, weight))
        if stacked:
            return ClippedGradientLinear.call(x, weight, bound), 0
        y = ClippedGradientLinear.call(_rows(x), weight, bound)
        return y.reshape(*x.shape[:-1], y.shape[-1]), 0


@overridable
def fused_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str = "relu") -> Tensor:
    r"""A linear layer and its activation in one Function, which never saves the pre-activation.

    $$ y = a(x w^T + b) $$

    Relu saves a mask of one byte per element for backward; tanh saves the output, which the next layer usually saves
    anyway. Silu and gelu recompute the pre-activation in backward: a matrix product saves the memory of an activation.

    Args:
        x: Floating-point tensor (..., in).
        weight: Tensor (out, in).
        bias: Tensor (out,), or None.
        activation: "relu", "tanh", "silu" or "gelu" (exact). The derivative of relu at 0 is 0.

    Returns:
        Tensor (..., out).

    Raises:
        InputError: If an argument is invalid.

    Example:
        >>> import torch
        >>> x, weight = torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, -1.0], [1.0, 1.0]])
        >>> fused_linear(x, weight, torch.tensor([0.5, 0.5]))
        tensor([[0.0000, 3.5000]])

    Source: T. Chen et al., "Training deep nets with sublinear memory cost", 2016, section 3 (recomputation).
    """
    _require_product("fused_linear", x, weight, bias)
    require_choice("fused_linear", "activation", activation, tuple(FUSED_ACTIVATIONS))
    x, weight, bias = autocast_like_torch(x, weight, bias)
    require_one_dtype("fused_linear", x=x, weight=weight, bias=bias)
    found = FUSED_ACTIVATIONS[activation]
    if found.alone is not None and can_forget():
        if found.from_output:
            return found.alone(_affine(x, weight, bias))
        return forget_between(_affine, (x, weight, bias), found.alone)
    return FusedLinear.call(x, weight, bias, activation)


@overridable
def clipped_gradient_linear(x: Tensor, weight: Tensor, bound: float) -> Tensor:
    r"""A linear map with exact values, whose gradients are clamped to $[-c, c]$ elementwise.

    $$ y = x w^T, \qquad \bar x = \operatorname{clamp}(\bar y\, w,\, \pm c), \quad
       \bar w = \operatorname{clamp}(\bar y^T x,\, \pm c) $$

    No function has these gradients, so the following is a definition. The formulas above are differentiated to any
    order: the clamp's derivative is 1 within the bounds, ends included, and 0 beyond. Every reverse pass through the
    value clamps its gradients; in reverse-over-reverse, this includes the outer pass. Forward-over-reverse is the plain
    derivative of the clamped gradient. Forward mode of the value, and its derivatives, are those of the exact map.
    Where nothing is clamped, all routes agree. Under `torch.func.vmap`, the gradients of each example are clamped
    before any sum.

    Args:
        x: Floating-point tensor (..., in).
        weight: Tensor (out, in).
        bound: $c$, a number of at least 0.

    Returns:
        Tensor (..., out).

    Raises:
        InputError: If an argument is invalid.

    Example:
        >>> import torch
        >>> x = torch.tensor([1.0, 5.0])
        >>> torch.func.grad(lambda w: clipped_gradient_linear(x, w, 2.0).sum())(torch.ones(1, 2))
        tensor([[1., 2.]])

    Source: A. Graves, "Generating sequences with recurrent neural networks", 2013, section 2.1 (clipped derivatives).
    """
    _require_product("clipped_gradient_linear", x, weight, None)
    require_number("clipped_gradient_linear", "bound", bound, nonnegative=True)
    x, weight = autocast_like_torch(x, weight)
    require_one_dtype("clipped_gradient_linear", x=x, weight=weight)
    return ClippedGradientLinear.call(x, weight, bound)


def _affine(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if weight.dim() == 2:
        return torch.nn.functional.linear(x, weight, bias)
    product = x @ weight.mT
    return product if bias is None else product + bias.unsqueeze(-2)


def _weight_gradient(cotangent: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    if weight.dim() == 2:
        return _as_matrix(cotangent).mT @ _as_matrix(x)
    return (cotangent.mT @ x).sum_to_size(weight.shape)


def _as_matrix(x: Tensor) -> Tensor:
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _bias_gradient(cotangent: Tensor, shape: torch.Size) -> Tensor:
    return (cotangent if len(shape) == 1 else cotangent.sum(-2)).sum_to_size(shape)


def _in_front(tensor: Tensor, dim: int | None) -> Tensor:
    return tensor.unsqueeze(0) if dim is None else tensor.movedim(dim, 0)


def _rows(x: Tensor) -> Tensor:
    """Flatten the dimensions between the batch and the features."""
    return x.reshape(x.shape[0], math.prod(x.shape[1:-1]), x.shape[-1])


def _require_product(function: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    require_floating(function, x=x, weight=weight, **({} if bias is None else {"bias": bias}))
    if weight.dim() != 2:
        raise InputError(f"{function}: weight: expected shape (out, in), got {tuple(weight.shape)}.")
    if x.dim() == 0 or x.shape[-1] != weight.shape[1]:
        raise InputError(
            f"{function}: x: expected {weight.shape[1]} features in the last dimension, as weight "
            f"{tuple(weight.shape)} has, got shape {tuple(x.shape)}; weight.mT swaps its dimensions."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise InputError(f"{function}: bias: expected shape ({weight.shape[0]},), got {tuple(bias.shape)}.")
