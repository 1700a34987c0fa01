r"""Rows of logits: their terms, and cotangents of logits with tangents, by kernels that support the logits.

Formulas and symbols are those of `term_formulas`. Kernels need a tile of logits that nothing else uses, and overwrite
it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hodiff.kernels import fused
from hodiff.kernels.cross_entropy import cpu, gpu
from hodiff.kernels.products_in_float32 import wide


class Options(NamedTuple):
    """Options of a loss on which its terms depend."""

    ignore: int
    softcap: float | None
    smoothed: bool


class Rows(NamedTuple):
    """Logits of some samples and classes.

    Attributes:
        options: Options of the loss.
        target: Target of each sample.
        first: Number of the first class; None for all classes.
        z: The logits.
        dtype: Dtype to which factors of matrix products are rounded.
    """

    options: Options
    target: Tensor
    first: int | None
    z: Tensor
    dtype: torch.dtype


def value(rows: Rows, u: Any) -> Tensor:
    """Compute the terms; the log-sum-exp is taken over the given classes."""
    if _on_gpu(rows, u, rows.z):
        return gpu.terms(rows.z, None, None, _target(rows), rows.options.smoothed)
    by_kernel = rows.first is not None and fused.takes(rows.z)
    total = fused.logsumexp(rows.z) if by_kernel else rows.z.logsumexp(-1, keepdim=True)
    return terms(rows, total, rows.z, u)


def tangent(rows: Rows, lse: Tensor | None, z_t: Tensor, u: Any) -> Tensor:
    """Compute the tangent of the terms."""
    if lse is not None and _on_gpu(rows, u, rows.z, z_t):
        return gpu.terms(rows.z, z_t, wide(lse), _target(rows), rows.options.smoothed)
    return terms(rows, (probabilities(rows, lse) * z_t).sum(-1, keepdim=True), z_t, u)


def terms(rows: Rows, lse: Tensor, z: Tensor, u: Any) -> Tensor:
    """Concatenate the terms of each sample, from logits or from their tangents."""
    place, here = _location(rows)
    hit = torch.where(here, z.gather(-1, place), 0)
    if not rows.options.smoothed:
        return torch.cat((lse, hit), -1)
    return torch.cat((lse, hit, z.sum(-1, keepdim=True) if u is None else z @ wide(u)), -1)


def probabilities(rows: Rows, lse: Tensor | None) -> Tensor:
    """Compute $P$."""
    return torch.softmax(rows.z, -1) if lse is None else torch.exp(rows.z - wide(lse))


def overwritten_by_probabilities(rows: Rows, lse: Tensor) -> Tensor:
    """Compute $P$; kernels overwrite the logits with it."""
    ones = torch.ones_like(lse, dtype=rows.z.dtype)
    if _on_cpu(rows, rows.z):
        return cpu.cotangent_(rows.z, wide(lse), ones, None, None, torch.zeros_like(rows.target))
    if _on_gpu(rows, None, rows.z):
        g = torch.cat((ones, torch.zeros_like(ones)), -1)
        return gpu.cotangent(rows.z, wide(lse), g, _target(rows), False, rows.dtype)
    return probabilities(rows, lse)


def cotangent(rows: Rows, lse: Tensor | None, u: Any, g: Tensor) -> Tensor:
    r"""Compute $\bar Z$; kernels overwrite the logits with it, or round it."""
    smoothed = rows.options.smoothed
    if lse is not None and not (smoothed and u is not None):
        if _on_cpu(rows, rows.z):
            rest = g[..., 2:] if smoothed else None
            return cpu.cotangent_(rows.z, wide(lse), g[..., :1], g[..., 1:2], rest, _place(rows))
        if _on_gpu(rows, u, rows.z):
            return gpu.cotangent(rows.z, wide(lse), g, _target(rows), smoothed, rows.dtype)
    return _spread(rows, probabilities(rows, lse) * g[..., :1], u, g)


def curvature(
    rows: Rows,
    lse: Tensor | None,
    u: Any,
    cotangents: tuple[Tensor, Tensor | None],
    z_t: Any,
    mean_t: Any,
    needs_z_bar: bool,
) -> tuple[Any, Tensor]:
    r"""Compute $\bar Z$, if needed, and its tangent; kernels overwrite the logits and their tangent, or round both."""
    (g, g_t), smoothed = cotangents, rows.options.smoothed
    if z_t is not None and g_t is not None:
        mean_t = mean_t - g_t[..., :1]
    if z_t is not None and lse is not None and not (smoothed and u is not None):
        if _on_cpu(rows, rows.z, z_t):
            at_target = g[..., 1:2], None if g_t is None else g_t[..., 1:2]
            everywhere = (g[..., 2:], None if g_t is None else g_t[..., 2:]) if smoothed else (None, None)
            numbers = (wide(lse), g[..., :1], mean_t, at_target, everywhere)
            return cpu.curvature_(rows.z, z_t, *numbers, _place(rows))
        if _on_gpu(rows, u, rows.z, z_t):
            at = _target(rows)
            return gpu.curvature(rows.z, z_t, wide(lse), (g, g_t), mean_t, at, smoothed, rows.dtype, needs_z_bar)
    p = probabilities(rows, lse)
    z_bar_t = p * (g_t[..., :1] if z_t is None and g_t is not None else g[..., :1] * z_t - mean_t)
    z_bar_t = z_bar_t if g_t is None else _spread(rows, z_bar_t, u, g_t)
    return _spread(rows, p * g[..., :1], u, g) if needs_z_bar else None, z_bar_t


def _on_cpu(rows: Rows, *tiles: Tensor) -> bool:
    return rows.first is not None and cpu.takes(*tiles)


def _on_gpu(rows: Rows, u: Any, *tiles: Tensor) -> bool:
    return rows.first is not None and not (rows.options.smoothed and u is not None) and gpu.takes(*tiles)


def _target(rows: Rows) -> gpu.Target:
    assert rows.first is not None
    return gpu.Target(rows.target, rows.options.ignore, rows.first)


def _location(rows: Rows) -> tuple[Tensor, Tensor]:
    """Index of the target among the given classes, or 0, and whether it is one of them."""
    target, first = rows.target, rows.first
    counted = target != rows.options.ignore
    if first is None:
        return torch.where(counted, target, 0), counted
    place = target - first
    here = counted & (place >= 0) & (place < rows.z.shape[-1])
    return torch.where(here, place, 0), here


def _place(rows: Rows) -> Tensor:
    """Index of the target, or -1 if it is not among the given classes."""
    place, here = _location(rows)
    return torch.where(here, place, -1)


def _spread(rows: Rows, z_bar: Tensor, u: Any, g: Tensor) -> Tensor:
    r"""Add target and smoothing to the first part of $\bar Z$, $\gamma P$, or to its tangent."""
    place, here = _location(rows)
    z_bar = z_bar.scatter_add(-1, place, torch.where(here, g[..., 1:2], 0))
    if not rows.options.smoothed:
        return z_bar
    return z_bar + (g[..., 2:] if u is None else g[..., 2:] * wide(u).mT)
