"""Identities that change or watch the gradient.

`stop_gradient`, `scale_gradient` and `reverse_gradient` define a Jacobian, a multiple of the identity, which every
route uses. `clip_gradient` and `noise_gradient` have no Jacobian: they change the gradients of every reverse pass, and
forward mode raises. `log_gradient` is the identity and only watches.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hodiff.common.options import require_callable
from hodiff.common.overriding import overridable
from hodiff.errors import InputError
from hodiff.functions.gradients.reverse_only import Changed
from hodiff.functions.gradients.reverse_only import ClipGradient as ClipGradient
from hodiff.functions.gradients.reverse_only import NoiseGradient as NoiseGradient
from hodiff.functions.gradients.reverse_only import clip_gradient as clip_gradient
from hodiff.functions.gradients.reverse_only import noise_gradient as noise_gradient
from hodiff.rules.any_order import AnyOrderFunction, outside_graphs
from hodiff.rules.arguments import require_broadcasts_to, require_floating, require_number_or_floating
from hodiff.rules.elementwise import batch_in_front
from hodiff.rules.nesting import nestable_jvp

_logger = logging.getLogger("hodiff")


@overridable
def stop_gradient(x: Tensor) -> Tensor:
    r"""The identity with derivative zero in every route: `x.detach()` under the name that the literature uses.

    Args:
        x: Tensor of any shape.

    Returns:
        Tensor that shares the memory of `x`, without a graph.

    Raises:
        InputError: If `x` is not a tensor.

    Example:
        >>> import torch
        >>> torch.func.grad(lambda x: x * stop_gradient(x))(torch.tensor(3.0))
        tensor(3.)
    """
    if not isinstance(x, Tensor):
        raise InputError(f"stop_gradient: x: expected a tensor, got {type(x).__name__}.")
    return x.detach()


class ScaleGradient(AnyOrderFunction):
    """The Function behind `scale_gradient` and `reverse_gradient`. Saves the factor."""

    @staticmethod
    def forward(x: Tensor, factor: Any) -> Tensor:
        """Copy x; compiled code ignores jvp and gets primitives with derivative `factor`."""
        if not torch.compiler.is_compiling():
            # A view could not be changed in place, and torch requires its tangent to be a view of the tangent.
            return x.clone()
        # x - x is an exact zero with a derivative.
        constant = x.detach()
        return torch.where(constant.isfinite(), constant + factor * (x - constant), constant)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save the factor."""
        del output
        factor = inputs[1] if isinstance(inputs[1], Tensor) else None
        ctx.save_for_backward(factor)
        ctx.save_for_forward(factor)
        ctx.number = None if factor is not None else inputs[1]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor | None) -> Any:
        """Multiply by the factor."""
        if cotangent is None or not ctx.needs_input_grad[0]:
            return None, None
        (factor,) = ctx.saved_tensors
        return cotangent * (ctx.number if factor is None else factor), None

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, tangent: Tensor | None, _: Any) -> Tensor | None:
        """Multiply by the factor."""
        (factor,) = ctx.saved_tensors
        return None if tangent is None else tangent * (ctx.number if factor is None else factor)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], x: Tensor, factor: Any) -> tuple[Tensor, int]:
        """Put the batches in front and let them broadcast."""
        x, factor = batch_in_front(in_dims, (x, factor))
        if in_dims[0] is None:
            x = x.expand(info.batch_size, *x.shape)
        return ScaleGradient.call(x, factor), 0


@overridable
def scale_gradient(x: Tensor, factor: Tensor | float) -> Tensor:
    r"""The identity with Jacobian $c\,I$: gradients and tangents are multiplied by $c$ in every route.

    $$ y = x, \qquad \mathrm{D} y = c\,I, \qquad \mathrm{D}^2 y = 0 $$

    Args:
        x: Floating-point tensor of any shape.
        factor: $c$, a constant: number, or floating-point tensor that broadcasts to the shape of `x`. It gets no
            gradient.

    Returns:
        A copy of `x`.

    Raises:
        InputError: If an argument is invalid.

    Example:
        >>> import torch
        >>> torch.func.grad(lambda x: scale_gradient(x, 0.5) ** 2)(torch.tensor(3.0))
        tensor(3.)
    """
    require_floating("scale_gradient", x=x)
    require_number_or_floating("scale_gradient", factor=factor)
    return _scaled("scale_gradient", "factor", x, factor, 1)


@overridable
def reverse_gradient(x: Tensor, strength: Tensor | float = 1.0) -> Tensor:
    r"""The identity with Jacobian $-\lambda I$: a gradient reversal layer, consistent in every route.

    Args:
        x: Floating-point tensor of any shape.
        strength: $\lambda$, a constant: number, or floating-point tensor that broadcasts to the shape of `x`. It gets
            no gradient.

    Returns:
        A copy of `x`.

    Raises:
        InputError: If an argument is invalid.

    Example:
        >>> import torch
        >>> torch.func.grad(lambda x: reverse_gradient(x, 0.5) ** 2)(torch.tensor(3.0))
        tensor(-3.)

    Source: Y. Ganin & V. Lempitsky, "Unsupervised domain adaptation by backpropagation", 2015, section 3.2.
    """
    require_floating("reverse_gradient", x=x)
    require_number_or_floating("reverse_gradient", strength=strength)
    return _scaled("reverse_gradient", "strength", x, strength, -1)


def _scaled(function: str, name: str, x: Tensor, factor: Any, sign: int) -> Tensor:
    if isinstance(factor, Tensor):
        require_broadcasts_to(function, name, factor, x.shape)
        factor = factor.detach()
    return ScaleGradient.call(x, sign * factor)


class LogGradient(AnyOrderFunction):
    """The Function behind `log_gradient`. Saves nothing."""

    @staticmethod
    def forward(x: Tensor, record: Callable[[Tensor], Any]) -> Tensor:
        """Copy x."""
        del record
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save the callback."""
        del output
        ctx.record = inputs[1]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor | None) -> Any:
        """Pass the gradient to the callback."""
        record = ctx.record

        def shown(x: Tensor) -> Tensor:
            record(x.clone())
            return x.clone()

        return None if cotangent is None else Changed.apply(cotangent, shown), None

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        """Copy the tangent, because functions may change one of the tangents in place."""
        del ctx
        return tangent.clone()

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, record: Any) -> tuple[Tensor, int]:
        """Log the whole batch at once."""
        del info
        return LogGradient.call(x.movedim(in_dims[0], 0), record), 0


@overridable
@outside_graphs
def log_gradient(x: Tensor, record: Callable[[Tensor], Any] | None = None, *, name: str = "gradient") -> Tensor:
    r"""The identity in every route; reverse passes call `record` with the gradient, and return it unchanged.

    `record` is called once in each reverse pass through `x`, also the second, and never in forward mode. A compiled
    function calls it uncompiled, which fullgraph=True forbids.

    Args:
        x: Floating-point tensor of any shape.
        record: Function of a copy of the gradient, without a graph; `some_list.append` collects the copies. Under
            `torch.func.vmap`, it gets the gradients of the whole batch, batch dimensions in front. By default, the norm
            and the largest magnitude go to the logger "hodiff" at level INFO.
        name: Name of the gradient in the log.

    Returns:
        A copy of `x`.

    Raises:
        InputError: If an argument is invalid.

    Example:
        >>> import torch
        >>> seen = []
        >>> torch.func.grad(lambda x: log_gradient(x, seen.append) ** 2)(torch.tensor(3.0))
        tensor(6.)
        >>> seen
        [tensor(6.)]
    """
    require_floating("log_gradient", x=x)
    if record is not None:
        require_callable("log_gradient", record=record)
    return LogGradient.call(x, record or _to_logger(name))


def _to_logger(name: str) -> Callable[[Tensor], None]:
    def record(gradient: Tensor) -> None:
        largest = gradient.abs().max() if gradient.numel() else gradient.sum()
        _logger.info("%s: norm %.3g, largest magnitude %.3g", name, gradient.norm(), largest)

    return record


def gradient_hook(control: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Callable[[Tensor], Tensor]:
    r"""Make a tensor hook from a gradient control: `tensor.register_hook(gradient_hook(...))`.

    Args:
        control: `stop_gradient`, `scale_gradient`, `reverse_gradient`, `clip_gradient`, `noise_gradient`,
            `log_gradient`, or any function of a tensor that keeps its shape and has a constant derivative.
        *args: Further arguments of `control`.
        **kwargs: Further keyword arguments of `control`.

    Returns:
        The hook: a differentiable map from the incoming to the outgoing gradient.

    Example:
        >>> import torch
        >>> x = torch.tensor([3.0, 4.0], requires_grad=True)
        >>> handle = x.register_hook(gradient_hook(clip_gradient, max_norm=1.0))
        >>> (5 * x).sum().backward()
        >>> x.grad
        tensor([0.7071, 0.7071])
    """
    require_callable("gradient_hook", control=control)

    def hook(gradient: Tensor) -> Tensor:
        differentiable = torch.is_grad_enabled()
        with torch.enable_grad():
            probe = torch.zeros_like(gradient, requires_grad=True)
            output = control(probe, *args, **kwargs)
            if not output.requires_grad:
                return torch.zeros_like(gradient)
            return torch.autograd.grad(output, probe, gradient, create_graph=differentiable)[0]

    return hook
