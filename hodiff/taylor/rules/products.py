"""Rules for products of many factors, by halves or by doubled steps, so that factors may be 0."""

from __future__ import annotations

from typing import Any

import torch

from hodiff.taylor.registry import rule
from hodiff.taylor.series import Frame


@rule("matrix_power", "linalg.matrix_power", analytic=True)
def matrix_power(frame: Frame, func: Any, A: Any, n: int, *, out: None = None) -> Any:
    """Matrix power by repeated squaring."""
    if n == 0:
        return func(A.value, 0)
    base = torch.linalg.inv(A) if n < 0 else A
    n, result = abs(n), None
    while n:
        if n % 2:
            result = base if result is None else result @ base
        base, n = (base @ base, n // 2) if n > 1 else (base, 0)
    return result


@rule("prod", analytic=True)
def prod(frame: Frame, func: Any, x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """Multiply the two halves with each other until one factor is left; factors may be 0."""
    x = x if dtype is None else x.to(dtype)
    if dim is None:
        x, dim, keepdim = x.reshape(-1), 0, False
    if x.ndim == 0:
        return x
    x = torch.movedim(x, dim, -1)
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        rest = x[..., 2 * half :]
        x = torch.cat((x[..., :half] * x[..., half : 2 * half], rest), -1)
    if x.shape[-1] == 0:
        return torch.prod(x.value, -1)
    return torch.movedim(x, -1, dim) if keepdim else x.squeeze(-1)


@rule("cumprod", analytic=True)
def cumprod(frame: Frame, func: Any, x: Any, dim: int, *, dtype: Any = None, out: None = None) -> Any:
    """Multiply each element by the partial product 1, 2, 4, ... places before it."""
    x = x if dtype is None else x.to(dtype)
    if x.ndim == 0:
        return x
    x, step = torch.movedim(x, dim, -1), 1
    while step < x.shape[-1]:
        x = torch.cat((x[..., :step], x[..., step:] * x[..., :-step]), -1)
        step *= 2
    return torch.movedim(x, -1, dim)
