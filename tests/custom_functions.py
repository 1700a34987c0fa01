"""Custom Functions for tests: written in one line, and two that several tests share."""

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

Rule = Callable[..., Any]


def custom(
    name: str, forward: Rule, backward: Rule | None = None, jvp: Rule | None = None, *, vmap: bool = False
) -> Any:
    """Return a Function with `setup_context`, which saves its inputs; `vmap` generates the batching rule."""

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)
        if jvp is not None:
            ctx.save_for_forward(*inputs)

    rules = {"forward": forward, "setup_context": setup_context, "backward": backward, "jvp": jvp}
    members = {key: staticmethod(rule) for key, rule in rules.items() if rule is not None}
    return type(name, (torch.autograd.Function,), {"generate_vmap_rule": vmap, **members})


def old_style(name: str, forward: Rule, backward: Rule) -> Any:
    """Return a Function whose forward takes ctx; `forward` returns the value and the tensors to save."""

    def with_context(ctx: Any, *inputs: Any) -> Any:
        value, *saved = forward(*inputs)
        ctx.save_for_backward(*saved)
        return value

    # hodiff recognizes rules by their code, which differs between Functions.
    with_context.__code__ = with_context.__code__.replace(co_name=f"forward of {name}")
    members = {"forward": staticmethod(with_context), "backward": staticmethod(backward)}
    return type(name, (torch.autograd.Function,), members)


def in_place_multiple(name: str, factor: float) -> Any:
    """Return a Function that multiplies its input in place, and marks it as dirty."""
    rules: dict[str, Rule] = {
        "forward": lambda x: x.mul_(factor),
        "setup_context": lambda ctx, inputs, output: ctx.mark_dirty(*inputs),
        "backward": lambda ctx, g: factor * g,
        "jvp": lambda ctx, t: t.mul_(factor),
    }
    return type(name, (torch.autograd.Function,), {key: staticmethod(rule) for key, rule in rules.items()})


def cubed_slope(ctx: Any, vector: Any) -> Any:
    """Multiply by the derivative of x³ at the saved x."""
    return 3 * ctx.saved_tensors[0] ** 2 * vector


def squared_slope(ctx: Any, vector: Any) -> Any:
    """Multiply by the derivative of x² at the saved x."""
    return 2 * ctx.saved_tensors[0] * vector


# x³, whose backward is marked once_differentiable; and x², with correct derivatives by every route
Cube = custom("Cube", lambda x: x**3, once_differentiable(cubed_slope), cubed_slope, vmap=True)
Square = custom("Square", lambda x: x**2, squared_slope, squared_slope, vmap=True)
