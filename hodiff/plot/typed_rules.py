"""Functions whose rules are expressions, such as those typed into a notebook."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from hodiff.errors import InputError
from hodiff.rules.nesting import nestable_jvp

KNOWN = {"torch": torch, "F": F}


def typed_function(forward: str, backward: str, jvp: str = "") -> type[Function]:
    r"""Make an elementwise `torch.autograd.Function` from expressions.

    The Function saves its input and its output. Expressions may use `torch`, `F` (`torch.nn.functional`) and methods of
    tensors; they run as Python, so type only what you would run.

    Args:
        forward: The value, in `x`: `"x.sin()"`.
        backward: The gradient, in the incoming gradient `g`, the input `x` and the output `y`: `"g * x.cos()"`.
        jvp: The tangent, in the incoming tangent `t`, `x` and `y`; by default `backward` with t for g, which is the
            same for an elementwise function.

    Returns:
        The Function.

    Raises:
        InputError: If a rule is no expression, or uses another name.

    Example:
        >>> import torch
        >>> Sine = typed_function("x.sin()", "g * x.cos()")
        >>> torch.func.grad(torch.func.grad(Sine.apply))(torch.tensor(0.5))
        tensor(-0.4794)
    """
    value = _compiled("typed_function: forward", forward, ("x",))
    pull = _compiled("typed_function: backward", backward, ("g", "x", "y"))
    push = (
        _compiled("typed_function: jvp", jvp, ("t", "x", "y"))
        if not isinstance(jvp, str) or jvp.strip()
        else lambda t, x, y: pull(g=t, x=x, y=y)
    )

    class Typed(Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return _tensor("typed_function: forward", value(x=x))

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
            ctx.save_for_backward(*inputs, output)
            ctx.save_for_forward(*inputs)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            x, y = ctx.saved_tensors
            return _tensor("typed_function: backward", pull(g=g, x=x, y=y))

        @staticmethod
        @nestable_jvp
        def jvp(ctx: Any, t: Tensor) -> Tensor:
            x = ctx.saved_tensors[0]
            return _tensor("typed_function: jvp", push(t=t, x=x, y=value(x=x)))

    return Typed


def typed_map(text: str) -> Callable[[Tensor], Any]:
    """Return the function of `x` that an expression defines."""
    return lambda x: _compiled("f", text, ("x",))(x=x)


def _compiled(argument: str, text: Any, names: tuple[str, ...]) -> Callable[..., Any]:
    if not isinstance(text, str):
        raise InputError(f"{argument}: expected an expression in {_listed(names)}, got {text!r}.")
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except SyntaxError as error:
        raise InputError(
            f"{argument}: expected an expression in {_listed(names)}, got {text!r}: {error.msg}."
        ) from None
    inner = {each.arg for each in ast.walk(tree) if isinstance(each, ast.arg)}
    used = {each.id for each in ast.walk(tree) if isinstance(each, ast.Name)}
    if unknown := sorted(used - inner - {*KNOWN, *names}):
        raise InputError(
            f"{argument}: expected an expression in {_listed(names)}, torch and F, got {unknown[0]!r} in {text!r}."
        )
    code = compile(tree, f"<{argument}>", "eval")
    return lambda **values: eval(code, {**KNOWN, **values})


def _tensor(argument: str, value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        raise InputError(f"{argument}: expected an expression that is a tensor, got {type(value).__name__}.")
    return value


def _listed(names: tuple[str, ...]) -> str:
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last
