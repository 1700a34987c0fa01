"""Forward mode inside forward mode for `torch.autograd.Function`.

Torch calls a Function's `jvp` with forward mode switched off, so that the tangent of the input does not run through
the formula a second time. But it switches off every level: an outer forward pass then takes the tangent for a constant
and returns zero, silently. `nestable_jvp` removes only the tangent of the pass that calls.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from hodiff.torch_internals.forward_mode import set_tangents
from hodiff.torch_internals.transforms import in_func_jvp
from hodiff.torch_internals.wrapped_tensors import without_tangent


def nestable_jvp(rule: Callable[..., Any]) -> Callable[..., Any]:
    r"""Make a Function's `jvp` differentiable by every enclosing forward pass.

    Decorate the rule below `@staticmethod`. It sees `ctx.saved_tensors` without the tangents of the pass that calls it
    and with those of all passes around it, so that forward-over-forward, and any deeper nesting, is right.

    Args:
        rule: `jvp(ctx, *tangents)`, made of differentiable torch operators or other Functions. Tensors come from
            `ctx.saved_tensors` alone (`ctx.save_for_forward` in `setup_context`).

    Returns:
        The rule to give to torch.

    Example:
        >>> import torch
        >>> from hodiff.functions import nestable_jvp
        >>> class Square(torch.autograd.Function):
        ...     @staticmethod
        ...     def forward(x):
        ...         return x * x
        ...
        ...     @staticmethod
        ...     def setup_context(ctx, inputs, output):
        ...         ctx.save_for_forward(*inputs)
        ...
        ...     @staticmethod
        ...     @nestable_jvp
        ...     def jvp(ctx, tangent):
        ...         (x,) = ctx.saved_tensors
        ...         return 2 * x * tangent
        >>> x, one = torch.tensor(3.0), torch.tensor(1.0)
        >>> slope = lambda x: torch.func.jvp(Square.apply, (x,), (one,))[1]
        >>> torch.func.jvp(slope, (x,), (one,))[1]
        tensor(2.)

    Source: torch/_functorch/autograd_function.py, `custom_function_call_grad`.
    """

    @wraps(rule)
    def jvp(ctx: Any, *tangents: Any) -> Any:
        # Without a functorch pass the caller is torch.autograd.forward_ad, which does not nest.
        if not in_func_jvp():
            return rule(ctx, *tangents)
        with set_tangents(True):
            return rule(_Undressed(ctx), *tangents)

    return jvp


class _Undressed:
    """A Function's context whose saved tensors carry no tangent of the pass that is running."""

    def __init__(self, ctx: Any):
        self._ctx = ctx

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        return tuple(without_tangent(tensor) for tensor in self._ctx.saved_tensors)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)
