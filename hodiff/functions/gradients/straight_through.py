"""Functions with the values of one function and the derivatives of another: straight-through estimators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hodiff.common.options import require_callable
from hodiff.common.overriding import stands_for_tensor
from hodiff.errors import InputError
from hodiff.rules.any_order import AnyOrderFunction
from hodiff.rules.blockwise import all_batched
from hodiff.rules.nesting import nestable_jvp
from hodiff.torch_internals.interception import apply_in_transform


class StraightThrough(AnyOrderFunction):
    """The Function behind `straight_through`: value of its second argument, derivatives of its first. Saves nothing."""

    @staticmethod
    def forward(surrogate: Tensor, value: Tensor) -> Tensor:
        """Copy the value; a view could not be changed in place later."""
        if not torch.compiler.is_compiling():
            return value.clone()
        # Compiled transforms ignore jvp, and dynamo differentiates this line. surrogate - surrogate is an exact zero
        # with a derivative; value + surrogate - value would not be exact.
        return torch.where(surrogate.isfinite(), value + (surrogate - surrogate.detach()), value)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save nothing: the Function is linear in the surrogate."""
        del inputs, output
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor | None) -> Any:
        """Pass the cotangent to the surrogate."""
        return cotangent if ctx.needs_input_grad[0] else None, None

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, tangent: Tensor | None, _: Tensor | None) -> Tensor | None:
        """Copy the tangent of the surrogate, because functions may change one of the tangents in place."""
        del ctx
        return None if tangent is None else tangent.clone()

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], surrogate: Tensor, value: Tensor) -> tuple[Tensor, int]:
        """Put both batch dimensions in front."""
        return StraightThrough.call(*all_batched(info.batch_size, in_dims, (surrogate, value))), 0


def straight_through(
    forward: Callable[..., Tensor], surrogate: Callable[..., Tensor], *, name: str | None = None
) -> Callable[..., Tensor]:
    r"""A function with the values of `forward` and the derivatives of `surrogate`, of every order and by every route.

    $$ y(x) = f(x), \qquad \mathrm{D}^k y(x) = \mathrm{D}^k s(x) \quad (k \ge 1) $$

    Both functions run: `forward` without a graph, so that its tensors get no gradient, and `surrogate` with a graph,
    which saves what its derivative needs. Within compiled transforms, an infinite surrogate has derivative zero.

    Args:
        forward: Computes the values: takes tensors and constants, and returns one floating-point tensor. It need not be
            differentiable.
        surrogate: Defines the derivatives: takes the same arguments, and returns a tensor of the same shape and dtype,
            by differentiable torch operators or Functions.
        name: Name of the result in error messages; by default the name of `forward`.

    Returns:
        The function, of the same positional arguments.

    Raises:
        InputError: If `forward` or `surrogate` is not callable; the function returned raises it if their results do not
            match.

    Example:
        >>> import torch
        >>> step = straight_through(lambda x: (x > 0).to(x.dtype), torch.sigmoid, name="step")
        >>> x = torch.tensor([-1.0, 2.0])
        >>> step(x)
        tensor([0., 1.])
        >>> torch.func.vmap(torch.func.grad(step))(x)
        tensor([0.1966, 0.1050])

    Source: Y. Bengio, N. Léonard & A. Courville, "Estimating or propagating gradients through stochastic neurons for
    conditional computation", 2013, section 4.
    """
    require_callable("straight_through", forward=forward, surrogate=surrogate)
    title: str = name or getattr(forward, "__name__", None) or "straight_through"

    def estimator(*inputs: Any) -> Tensor:
        constants = [each.detach() if isinstance(each, Tensor) or stands_for_tensor(each) else each for each in inputs]
        value, smooth = forward(*constants), surrogate(*inputs)
        if stands_for_tensor(smooth) and isinstance(value, Tensor):
            return smooth.__torch_function__(apply_in_transform, (), (StraightThrough, smooth, value))
        _require_same_kind(title, value, smooth)
        return StraightThrough.call(smooth, value.detach())

    estimator.__name__ = estimator.__qualname__ = title
    return estimator


def _require_same_kind(title: str, value: Any, smooth: Any) -> None:
    if isinstance(value, Tensor) and isinstance(smooth, Tensor):
        if value.shape == smooth.shape and value.dtype == smooth.dtype:
            return
        kinds = [f"{tuple(each.shape)} {str(each.dtype).removeprefix('torch.')}" for each in (value, smooth)]
    else:
        kinds = [type(each).__name__ for each in (value, smooth)]
    raise InputError(
        f"{title}: expected forward and surrogate to return tensors of one shape and dtype, got {kinds[0]} from "
        f"forward and {kinds[1]} from surrogate."
    )
