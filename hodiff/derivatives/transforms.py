"""`torch.func` transforms of functions that return `(output, aux)`, with the types that torch leaves open."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.func

from hodiff.derivatives.trees import PyTree


def push(f: Callable[..., Any], primals: tuple[PyTree, ...], tangents: tuple[PyTree, ...]) -> tuple[Any, Any, PyTree]:
    """Output, tangent and aux: forward mode."""
    result: Any = torch.func.jvp(f, primals, tangents, has_aux=True)
    return result


def pull(f: Callable[..., Any], *primals: PyTree) -> tuple[Any, Callable[[Any], tuple[Any, ...]], PyTree]:
    """Output, pullback and aux: reverse mode."""
    result: Any = torch.func.vjp(f, *primals, has_aux=True)
    return result


def gradient(f: Callable[..., Any]) -> Callable[..., Any]:
    """Function that returns gradient and aux."""
    return torch.func.grad(f, has_aux=True)
