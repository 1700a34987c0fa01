"""`torch.func` transforms of functions that return `(output, aux)`, with the types that torch leaves open."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.func
from torch.utils import _pytree as pytree

from hodiff.common.trees import PyTree
from hodiff.torch_internals.autograd.forward_mode import forward_pass, load_forward_rules


def push(f: Callable[..., Any], primals: tuple[PyTree, ...], tangents: tuple[PyTree, ...]) -> tuple[Any, Any, PyTree]:
    """Output, tangent and aux: forward mode, with the tangent in the dtypes of the output."""
    if not torch.compiler.is_compiling():
        load_forward_rules()
    output, tangent, aux = forward_pass(f, primals, tangents, has_aux=True)
    # torch promotes the tangent of a float32 scalar times a Python number to float64.
    return output, pytree.tree_map(lambda t, o: t.to(o.dtype), tangent, output), aux


def pull(f: Callable[..., Any], *primals: PyTree) -> tuple[Any, Callable[[Any], tuple[Any, ...]], PyTree]:
    """Output, pullback and aux: reverse mode."""
    result: Any = torch.func.vjp(f, *primals, has_aux=True)
    return result


def gradient(f: Callable[..., Any]) -> Callable[..., Any]:
    """Function that returns gradient and aux."""
    return torch.func.grad(f, has_aux=True)
