"""Products with an operator as a linear function of the vector, differentiable to any order by every route."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from hodiff.common.overriding import tensors_alone
from hodiff.common.running_pass import running_pass
from hodiff.operators.linear.constant_points import require_constants_held, require_no_gradients
from hodiff.torch_internals.autograd.batching import call_below_legacy_batch, is_legacy_batched
from hodiff.torch_internals.autograd.differentiation import only_reverse_mode
from hodiff.torch_internals.tensors import share_storage


class LinearProduct(torch.autograd.Function):
    r"""$V \mapsto A V$: its derivative is itself, its adjoint the product with the transpose."""

    @staticmethod
    def forward(block: Tensor, operator: Any) -> Tensor:
        """Multiply; see `LinearOperator.multiply`."""
        return _own(operator.multiply(block), block)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Save the operator."""
        ctx.operator = inputs[1]

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None]:
        """Multiply by the transpose."""
        return multiply(ctx.operator.T, cotangent), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        """Multiply the tangent."""
        return multiply(ctx.operator, tangent)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int, None], block: Tensor, operator: Any) -> tuple[Tensor, int]:
        """Multiply the columns of all blocks together."""
        return _together(operator, block.movedim(in_dims[0], 0)), 0


def multiply(operator: Any, block: Tensor) -> Tensor:
    """Multiply a block (n, k) by an operator, with a derivative in the block."""
    # Without a pass, a context that does nothing would only cost time.
    if torch.compiler.is_compiling() or running_pass() is None:
        return _multiply(operator, block)
    with tensors_alone():
        return _multiply(operator, block)


def _multiply(operator: Any, block: Tensor) -> Tensor:
    if operator.composed:
        product: Tensor = operator.multiply(block)
        return product
    # The Function costs some microseconds, and most callers differentiate nothing.
    if is_legacy_batched(block):
        batched: Tensor = call_below_legacy_batch(partial(_multiply, operator), (block,))
        return batched
    differentiated = torch.is_grad_enabled() and block.requires_grad
    if only_reverse_mode() and not differentiated:
        return _own(operator.multiply(block), block)
    if not operator.made_of_constants:
        require_constants_held(f"{type(operator).__name__} @ v", operator)
        require_no_gradients(operator)
    differentiable: Tensor = LinearProduct.apply(block, operator)
    return differentiable


def _own(product: Tensor, block: Tensor) -> Tensor:
    """Return the product, copied if it shares the memory of the block, as for the identity."""
    return product.clone() if share_storage(product, block) else product


def _together(operator: Any, blocks: Tensor) -> Tensor:
    """Multiply blocks (b, n, k) together."""
    count, n, k = blocks.shape
    wide = blocks.permute(1, 2, 0).reshape(n, k * count)
    return multiply(operator, wide).reshape(-1, k, count).permute(2, 0, 1)
