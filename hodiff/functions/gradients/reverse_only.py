"""Gradient clipping and noise: identities that change the gradients of reverse passes, without a Jacobian."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hodiff.common.options import require_number
from hodiff.common.overriding import overridable
from hodiff.errors import InputError, RouteError
from hodiff.functions.projections.euclidean import project_l2_ball
from hodiff.rules.any_order import AnyOrderFunction, outside_graphs
from hodiff.rules.arguments import require_dims, require_floating
from hodiff.rules.nesting import nestable_jvp


class ClipGradient(AnyOrderFunction):
    """The Function behind `clip_gradient`. Saves only numbers."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, low: Any, high: Any, max_norm: Any, dims: frozenset[int]) -> Tensor:
        """Copy x."""
        del low, high, max_norm, dims
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save the bounds, which are numbers."""
        del output
        _, ctx.low, ctx.high, ctx.max_norm, ctx.dims = inputs
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor | None) -> Any:
        """Clip the cotangent differentiably."""
        if cotangent is None:
            return (None,) * 5
        if ctx.max_norm is None:
            clipped = cotangent.clamp(ctx.low, ctx.high)
        elif cotangent.dim() == 0:
            clipped = cotangent.clamp(-ctx.max_norm, ctx.max_norm)
        else:
            clipped = project_l2_ball(cotangent, ctx.max_norm, tuple(ctx.dims))
        return clipped, None, None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        """Raise: clipping has no forward mode."""
        del ctx, tangents
        raise RouteError(_no_forward_mode("clip_gradient", "clipping a gradient is not linear in it"))


@overridable
@outside_graphs
def clip_gradient(
    x: Tensor,
    low: float | None = None,
    high: float | None = None,
    *,
    max_norm: float | None = None,
    dim: int | Sequence[int] | None = None,
) -> Tensor:
    r"""The identity, whose gradients in reverse mode are clipped, by value or by norm.

    $$ y = x, \qquad \bar x = \operatorname{clamp}(\bar y, l, h)
       \quad\text{or}\quad \bar x = \bar y \min(1, c / \lVert \bar y \rVert_2) $$

    Clipping is not linear, so no function has this derivative, and only reverse mode defines it. Each reverse pass
    through `x` is clipped, and the clipping itself is differentiated: the second of two nested passes passes where the
    first was not clipped, and is clipped in turn. Every route with forward mode raises. A compiled function calls it
    uncompiled, which fullgraph=True forbids.

    Args:
        x: Floating-point tensor of any shape.
        low: Lower bound $l$; no bound by default.
        high: Upper bound $h$; no bound by default.
        max_norm: Largest norm $c > 0$, instead of bounds.
        dim: Dimensions over which the norm is taken; all by default. Under `torch.func.vmap`, dimensions of one
            example.

    Returns:
        A copy of `x`.

    Raises:
        InputError: If an argument is invalid.

    Example:
        >>> import torch
        >>> x = torch.tensor([3.0, 4.0])
        >>> torch.func.grad(lambda x: clip_gradient(x, -1, 7).square().sum())(x)
        tensor([6., 7.])
        >>> torch.func.grad(lambda x: clip_gradient(x, max_norm=5.0).square().sum())(x)
        tensor([3., 4.])

    Source: R. Pascanu, T. Mikolov & Y. Bengio, "On the difficulty of training recurrent neural networks", 2013,
    algorithm 1.
    """
    require_floating("clip_gradient", x=x)
    bounds = {"low": low, "high": high, "max_norm": max_norm}
    for name, value in bounds.items():
        require_number("clip_gradient", name, value, optional=True)
    if (max_norm is None) == (low is None and high is None):
        given = ", ".join(name for name, value in bounds.items() if value is not None) or "none"
        raise InputError(f"clip_gradient: expected bounds (low, high or both) or max_norm, got {given}.")
    if low is not None and high is not None and not low <= high:
        raise InputError(f"clip_gradient: low: expected at most high, {high}, got {low}.")
    require_number("clip_gradient", "max_norm", max_norm, positive=True, optional=True)
    if dim is not None and max_norm is None:
        raise InputError("clip_gradient: dim: expected max_norm together with dim, got bounds.")
    # Use a frozenset: torch's batching of jvp fails on tuples of constants.
    dims = frozenset(require_dims("clip_gradient", x, tuple(range(x.dim())) if dim is None else dim))
    return ClipGradient.call(x, low, high, max_norm, dims)


class NoiseGradient(AnyOrderFunction):
    """The Function behind `noise_gradient`. Saves nothing."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, std: float, generator: torch.Generator) -> Tensor:
        """Copy x."""
        del std, generator
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save the constants."""
        del output
        _, ctx.std, ctx.generator = inputs
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor | None) -> Any:
        """Add noise to the gradient."""
        std, generator = ctx.std, ctx.generator

        def noisy(x: Tensor) -> Tensor:
            return x + std * torch.randn(x.shape, dtype=x.dtype, device=x.device, generator=generator)

        return None if cotangent is None else Changed.apply(cotangent, noisy), None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        """Raise: noise has no forward mode."""
        del ctx, tangents
        raise RouteError(_no_forward_mode("noise_gradient", "a gradient plus noise is not linear in the gradient"))


class Changed(AnyOrderFunction):
    """A tensor that a function computes from a plain tensor below all transforms; its derivative is the identity."""

    @staticmethod
    def forward(x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        """Apply the function."""
        return change(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save nothing."""

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        """Return the cotangent."""
        del ctx
        return cotangent, None

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        """Return the tangent."""
        del ctx
        return tangent

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, change: Any) -> tuple[Tensor, int]:
        """Apply the function to the whole batch at once; noise is then drawn for each example."""
        del info
        return Changed.apply(x.movedim(in_dims[0], 0), change), 0


@overridable
@outside_graphs
def noise_gradient(x: Tensor, std: float, generator: torch.Generator) -> Tensor:
    r"""The identity, whose gradients in reverse mode get normal noise, $\bar x = \bar y + \sigma \xi$.

    No function has this derivative, so only reverse mode defines it. Each reverse pass through `x`, also the second,
    draws its own noise, and under `torch.func.vmap` each example does. Every route with forward mode raises. A compiled
    function calls it uncompiled, which fullgraph=True forbids.

    Args:
        x: Floating-point tensor of any shape.
        std: $\sigma \ge 0$.
        generator: Generator of the noise, on the device of `x`.

    Returns:
        A copy of `x`.

    Raises:
        InputError: If an argument is invalid.

    Example:
        >>> import torch
        >>> generator = torch.Generator().manual_seed(0)
        >>> torch.func.grad(lambda x: noise_gradient(x, 0.1, generator).sum())(torch.zeros(3))
        tensor([1.1541, 0.9707, 0.7821])

    Source: A. Neelakantan et al., "Adding gradient noise improves learning for very deep networks", 2015, section 3.
    """
    require_floating("noise_gradient", x=x)
    require_number("noise_gradient", "std", std, nonnegative=True)
    if not isinstance(generator, torch.Generator) or generator.device.type != x.device.type:
        kind = generator.device if isinstance(generator, torch.Generator) else type(generator).__name__
        raise InputError(f"noise_gradient: generator: expected a torch.Generator on {x.device}, got {kind}.")
    return NoiseGradient.call(x, std, generator)


def _no_forward_mode(function: str, reason: str) -> str:
    return (
        f"{function}: forward mode has no derivative to give here: {reason}, so no Jacobian belongs to it. Take the "
        'route "reverse-over-reverse", or leave the function out where tangents pass.'
    )
