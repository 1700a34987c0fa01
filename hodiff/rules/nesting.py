"""Forward mode inside forward mode for `torch.autograd.Function`.

Torch calls a Function's `jvp` with forward mode switched off, so that the tangent of the input does not run through the
formula a second time. But it switches off every level: an outer forward pass then treats the tangent as a constant and
silently returns zero. `nestable_jvp` removes only the tangent of the pass that calls.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from hodiff.common.options import require_callable
from hodiff.torch_internals.autograd.grad_mode import has_tangent, set_tangents
from hodiff.torch_internals.autograd.transforms import innermost_is_vmap, innermost_jvp_level
from hodiff.torch_internals.autograd.wrapped_tensors import without_tangent


def nestable_jvp(rule: Callable[..., Any]) -> Callable[..., Any]:
    r"""Make a Function's `jvp` differentiable by every enclosing forward pass.

    Decorate the rule below `@staticmethod`. The rule sees the tensors of `ctx` without the tangents of the pass that
    calls it, and with the tangents of all enclosing passes. So forward-over-forward, and any deeper nesting, is right.

    hodiff's transforms and `hodiff.corrected()` do this for every Function; the decorator is for derivatives that torch
    takes alone.

    Args:
        rule: `jvp(ctx, *tangents)`, composed of differentiable torch operators or other Functions. Tensors come from
            `ctx.saved_tensors` (`ctx.save_for_forward` in `setup_context`) or attributes of `ctx`.

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
    require_callable("nestable_jvp", rule=rule)

    @wraps(rule)
    def jvp(ctx: Any, *tangents: Any) -> Any:
        level = innermost_jvp_level()
        # Without a functorch pass the caller is torch.autograd.forward_ad, which does not nest.
        if level is None:
            return rule(ctx, *tangents)
        with set_tangents(True):
            return rule(_Undressed(ctx, level), *tangents)

    return jvp


class _Undressed:
    """A Function's context whose tensors carry no tangent of the running pass."""

    def __init__(self, ctx: Any, level: int):
        vars(self).update(_ctx=ctx, _level=level)

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        return tuple(without_tangent(tensor, self._level) for tensor in self._ctx.saved_tensors)

    def __getattr__(self, name: str) -> Any:
        return _undressed(getattr(self._ctx, name), self._level)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._ctx, name, value)


def _undressed(value: Any, level: int) -> Any:
    """Remove the tangent of a level from a tensor or the tensors of a container."""
    if isinstance(value, Tensor):
        return without_tangent(value, level)
    if isinstance(value, list | tuple | dict):
        return pytree.tree_map_only(Tensor, lambda tensor: without_tangent(tensor, level), value)
    return value


def without_own_tangents(pushed: Any) -> Any:
    """Remove the tangents of the innermost forward pass from the results of a rule."""
    level = innermost_jvp_level()
    if level is None:
        return pushed

    def bare(tensor: Tensor) -> Any:
        return without_tangent(tensor, level) if innermost_is_vmap() or has_tangent(tensor) else tensor

    return pytree.tree_map_only(Tensor, bare, pushed)
