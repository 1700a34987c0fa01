"""Norms of vectors, and what divides by them."""

from __future__ import annotations

from typing import Any

import torch

from hodiff.taylor.fallback import unknown
from hodiff.taylor.registry import rule
from hodiff.taylor.series import Frame
from hodiff.taylor.substitution import value_of


@rule("nn.normalize")
def normalize(
    frame: Frame, func: Any, x: Any, p: float = 2.0, dim: Any = 1, eps: float = 1e-12, out: None = None
) -> Any:
    """Over the norm, or eps where that is larger."""
    return x / torch.clamp_min(torch.linalg.vector_norm(x, p, dim, keepdim=True), eps)


@rule("linalg.vector_norm")
def vector_norm(
    frame: Frame,
    func: Any,
    x: Any,
    ord: Any = 2,
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: Any = None,
    **_: Any,
) -> Any:
    """By the definition."""
    x = x if dtype is None else x.to(dtype)
    dims = tuple(range(x.ndim)) if dim is None else dim
    size = torch.abs(x)
    if ord == float("inf"):
        return torch.amax(size, dims, keepdim=keepdim)
    if ord == -float("inf"):
        return torch.amin(size, dims, keepdim=keepdim)
    if ord == 0:
        return torch.linalg.vector_norm(value_of(frame, x), 0, dim, keepdim)
    if ord == 1:
        return size.sum(dims, keepdim=keepdim)
    if ord == 2:
        squares = (x * x).sum(dims, keepdim=keepdim)
        # At 0 torch's derivative is 0.
        still = value_of(frame, squares) == 0
        return torch.where(still, 0.0, torch.sqrt(torch.where(still, 1.0, squares)))
    return torch.pow(torch.pow(size, ord).sum(dims, keepdim=keepdim), 1 / ord)


@rule("linalg.norm", "norm")
def norm(
    frame: Frame, func: Any, x: Any, ord: Any = None, dim: Any = None, keepdim: bool = False, **kwargs: Any
) -> Any:
    """That of vectors, of all elements or of a dimension."""
    ord = kwargs.pop("p", ord)
    if ord == "fro" or ord is None:
        return torch.linalg.vector_norm(x, 2, dim, keepdim)
    number = isinstance(ord, (int, float))
    classic = not getattr(func, "__name__", "").startswith("linalg")
    if number and (classic or isinstance(dim, int) or (dim is None and x.ndim == 1)):
        return torch.linalg.vector_norm(x, ord, dim, keepdim)
    return unknown(frame, func, (x, ord, dim, keepdim), kwargs)


@rule("cosine_similarity", "nn.cosine_similarity")
def cosine_similarity(frame: Frame, func: Any, x1: Any, x2: Any, dim: int = 1, eps: float = 1e-8) -> Any:
    """The product of the two directions."""
    a = x1 / torch.clamp_min(torch.linalg.vector_norm(x1, 2, dim, keepdim=True), eps)
    b = x2 / torch.clamp_min(torch.linalg.vector_norm(x2, 2, dim, keepdim=True), eps)
    return (a * b).sum(dim)
