"""Rows of a tile of logits on a GPU, in float32, by Triton's kernels; results may be rounded to 16 bits."""

from __future__ import annotations

import warnings
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hodiff.errors import HodiffWarning
from hodiff.kernels.fused_library import is_plain, nothing_watches

# Kinds of devices whose tiles the kernels take.
DEVICES = ["cuda"]


class Target(NamedTuple):
    """The targets of the rows (rows, 1), the class that does not count, and the first class of the tile."""

    labels: Tensor
    ignore: int
    first: int


def takes(*tiles: Tensor) -> bool:
    """Whether the kernels support these logits and tangents of logits."""
    first = tiles[0]
    return (
        first.device.type in DEVICES
        and first.dim() == 2
        and first.numel() > 0
        and nothing_watches()
        and all(
            each.dtype is torch.float32
            and each.shape == first.shape
            and is_plain(each, first.device.type)
            and each.is_contiguous()
            for each in tiles
        )
        and _launches() is not None
    )


def terms(z: Tensor, z_t: Tensor | None, lse: Tensor | None, target: Target, smoothed: bool) -> Tensor:
    """Compute log-sum-exp of each row, or with a tangent its mean, number at the target and, if smoothed, sum."""
    out = z.new_empty(z.shape[0], 3 if smoothed else 2)
    _launches().terms(z, z_t, lse, target, out, smoothed)
    return out


def cotangent(z: Tensor, lse: Tensor, g: Tensor, target: Target, smoothed: bool, dtype: torch.dtype) -> Tensor:
    """Compute $g_0 P$, plus $g_1$ at the target and, if smoothed, $g_2$; float32 results overwrite the logits."""
    out = z if dtype is z.dtype else torch.empty_like(z, dtype=dtype)
    _launches().cotangent((z, None), lse, (g, None), None, target, (out, None), smoothed)
    return out


def curvature(
    z: Tensor,
    z_t: Tensor,
    lse: Tensor,
    cotangents: tuple[Tensor, Tensor | None],
    mean: Tensor,
    target: Target,
    smoothed: bool,
    dtype: torch.dtype,
    needs_cotangent: bool,
) -> tuple[Tensor | None, Tensor]:
    r"""Compute `cotangent`, if needed, and its tangent $P (g_0 \dot z - m)$, plus $\dot g_1$ and $\dot g_2$."""
    in_place = dtype is z.dtype
    out_t = z_t if in_place else torch.empty_like(z_t, dtype=dtype)
    out = (z if in_place else torch.empty_like(z, dtype=dtype)) if needs_cotangent else None
    _launches().cotangent((z, z_t), lse, cotangents, mean, target, (out, out_t), smoothed)
    return out, out_t


@cache
def _launches() -> Any:
    """Return the module of the launches, or None, with a warning, if Triton does not work here."""
    if find_spec("triton") is None:
        return None
    try:
        launches = import_module("hodiff.kernels.cross_entropy.triton_launches")
        launches.require_working(DEVICES[0])
    except Exception as error:  # Triton's compiler and drivers raise errors of many types
        warnings.warn(
            f"linear_cross_entropy: hodiff does not use Triton's kernels: {type(error).__name__}: {error}. It runs "
            "torch's operators, which is slower; another version of triton may help.",
            HodiffWarning,
            stacklevel=2,
        )
        return None
    return launches
