"""Launches of the passes over rows of logits, with the sizes of their tiles."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from hodiff.kernels.attention.triton_blocks import Tile
from hodiff.kernels.attention.triton_launch import launch, signature
from hodiff.kernels.cross_entropy.gpu import Target
from hodiff.kernels.cross_entropy.triton_rows import cotangent_pass, terms_pass

# Rows, columns, warps and stages; 16 numbers of each tile for a thread. They were not compared by time.
TILES = {"terms": Tile(1, 2048, 4, 2), "cotangent": Tile(2, 1024, 4, 1)}
# Small unequal sizes give small tensors several tiles.
_INTERPRETED = Tile(2, 4, 1, 1)


def terms(z: Tensor, z_t: Tensor | None, lse: Tensor | None, target: Target, out: Tensor, smoothed: bool) -> None:
    """Launch `terms_pass`."""
    known = None if lse is None else _numbers(lse)
    arguments = (z, z_t, known, target.labels, out, *z.shape, target.first, _step(known), _step(target.labels))
    _launch("terms", terms_pass, arguments, target, smoothed, z)


def cotangent(
    tiles: tuple[Tensor, Tensor | None],
    lse: Tensor,
    cotangents: tuple[Tensor, Tensor | None],
    mean: Tensor | None,
    target: Target,
    results: tuple[Tensor | None, Tensor | None],
    smoothed: bool,
) -> None:
    """Launch `cotangent_pass`."""
    z = tiles[0]
    g, g_t = (None if each is None else _numbers(each) for each in cotangents)
    lse, mean = _numbers(lse), None if mean is None else _numbers(mean)
    steps = (_step(each) for each in (lse, g, mean, g_t, target.labels))
    arguments = (*tiles, lse, g, mean, g_t, target.labels, *results, *z.shape, target.first, *steps)
    _launch("cotangent", cotangent_pass, arguments, target, smoothed, z)


def require_working(kind: str) -> None:
    """Run both kernels on a few numbers, so that errors of a compiler or driver come before any result is used."""
    device = torch.device(kind)
    z, label = torch.zeros(2, 3, device=device), torch.zeros(2, 1, dtype=torch.int64, device=device)
    target, out = Target(label, -100, 0), torch.empty(2, 2, device=device)
    terms(z, None, None, target, out, smoothed=False)
    cotangent((z, None), out[:, :1], (out, None), None, target, (z, None), smoothed=False)


def _launch(kind: str, kernel: Any, arguments: tuple[Any, ...], target: Target, smoothed: bool, z: Tensor) -> None:
    key = (kind, target.ignore, smoothed, z.device, *[_inspected(each) for each in arguments])
    rows, columns = z.shape
    tile = _INTERPRETED if triton.knobs.runtime.interpret else TILES[kind]
    across = 1 if kind == "terms" else triton.cdiv(columns, tile.keys)
    launch(
        kernel,
        key,
        z.device,
        arguments,
        lambda: (
            {"IGNORE": target.ignore, "SMOOTHED": smoothed},
            (tile,),
            lambda tile: triton.cdiv(rows, tile.rows) * across,
        ),
    )


def _inspected(argument: Any) -> Any:
    """Return what compiled code may depend on; of numbers, which are not specialized, only None."""
    return signature(argument) if isinstance(argument, Tensor) else argument is None


def _numbers(t: Tensor) -> Tensor:
    """Return numbers of rows in float32, with neighbouring columns."""
    t = t.float()
    return t if t.shape[1] == 1 or t.stride(1) == 1 else t.contiguous()


def _step(t: Tensor | None) -> int:
    """Distance from one row to the next."""
    return 0 if t is None else t.stride(0)
