"""Sizes of tiles, by pass, dtype, head size and architecture; timed at run time only with HODIFF_TUNE_TILES=1.

`benchmarks/results/attention_kernels.md` has the registers, shared memory and instructions of each choice, as compiled.
Choices were not compared by time.
"""

from __future__ import annotations

import os
from typing import NamedTuple

import torch
import triton

# Arguments that change from batch to batch; a kernel compiled for one value serves all.
LENGTHS = ("length", "keys", "low", "high")


class Tile(NamedTuple):
    """A tile of scores; `warps` compute it, while the tiles of later iterations are loaded in `stages` buffers."""

    rows: int
    keys: int
    warps: int
    stages: int


# Greatest head size of each column of the tables.
_HEADS = (64, 128, 256)
_BFLOAT16_HOPPER = {
    "output": (Tile(128, 64, 8, 3), Tile(128, 64, 8, 3), Tile(64, 64, 8, 2)),
    "output tangent": (Tile(128, 64, 8, 3), Tile(64, 32, 8, 3), Tile(16, 16, 8, 1)),
    "keys": (Tile(64, 128, 8, 3), Tile(32, 128, 8, 3), Tile(16, 64, 8, 2)),
    "keys tangent": (Tile(32, 128, 8, 3), Tile(16, 128, 8, 2), Tile(16, 16, 8, 1)),
    "queries": (Tile(128, 64, 8, 3), Tile(128, 64, 8, 3), Tile(64, 32, 8, 2)),
    "queries tangent": (Tile(128, 64, 8, 2), Tile(128, 32, 8, 2), Tile(16, 16, 8, 1)),
}
_BFLOAT16 = {
    "output": (Tile(128, 64, 8, 3), Tile(128, 32, 8, 2), Tile(64, 32, 8, 2)),
    "output tangent": (Tile(64, 32, 4, 3), Tile(32, 16, 8, 2), Tile(16, 16, 8, 1)),
    "keys": (Tile(32, 128, 8, 3), Tile(32, 64, 8, 2), Tile(16, 32, 8, 1)),
    "keys tangent": (Tile(32, 64, 4, 3), Tile(32, 32, 8, 2), Tile(16, 16, 8, 1)),
    "queries": (Tile(128, 64, 8, 3), Tile(128, 32, 8, 2), Tile(32, 16, 8, 2)),
    "queries tangent": (Tile(64, 32, 4, 3), Tile(32, 32, 8, 2), Tile(16, 16, 8, 1)),
}
# Computed weights are multiplied in TF32, with values of 32 bits.
_FLOAT16_HOPPER = {
    "output": (Tile(128, 64, 8, 3), Tile(128, 32, 8, 2), Tile(64, 16, 8, 2)),
    "output tangent": (Tile(128, 32, 8, 3), Tile(32, 16, 8, 2), Tile(16, 16, 8, 1)),
    "keys": (Tile(64, 128, 8, 3), Tile(16, 128, 8, 2), Tile(16, 32, 8, 1)),
    "keys tangent": (Tile(32, 128, 8, 2), Tile(16, 32, 8, 2), Tile(16, 16, 8, 1)),
    "queries": (Tile(128, 64, 8, 3), Tile(128, 32, 8, 2), Tile(32, 16, 8, 2)),
    "queries tangent": (Tile(128, 32, 8, 2), Tile(32, 32, 8, 2), Tile(16, 16, 8, 1)),
}
_FLOAT16 = {
    "output": (Tile(64, 32, 8, 2), Tile(64, 32, 8, 2), Tile(16, 16, 8, 1)),
    "output tangent": (Tile(64, 32, 8, 2), Tile(32, 16, 8, 2), Tile(16, 16, 8, 1)),
    "keys": (Tile(32, 64, 8, 2), Tile(32, 32, 8, 2), Tile(16, 16, 8, 1)),
    "keys tangent": (Tile(32, 64, 8, 2), Tile(16, 32, 8, 2), Tile(16, 16, 8, 1)),
    "queries": (Tile(64, 32, 8, 2), Tile(32, 32, 8, 2), Tile(16, 16, 8, 1)),
    "queries tangent": (Tile(64, 32, 8, 2), Tile(32, 16, 8, 2), Tile(16, 16, 8, 1)),
}
_FLOAT32 = {
    "output": (Tile(32, 32, 8, 2), Tile(16, 32, 8, 1), Tile(16, 16, 8, 1)),
    "output tangent": (Tile(16, 16, 8, 1), Tile(16, 16, 4, 1), Tile(16, 16, 8, 1)),
    "keys": (Tile(32, 32, 8, 2), Tile(32, 16, 8, 1), Tile(16, 16, 8, 1)),
    "keys tangent": (Tile(16, 16, 8, 1), Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)),
    "queries": (Tile(32, 32, 8, 2), Tile(32, 16, 8, 1), Tile(16, 16, 8, 1)),
    "queries tangent": (Tile(16, 32, 8, 1), Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)),
}
_TILES = {
    (90, torch.bfloat16): _BFLOAT16_HOPPER,
    (80, torch.bfloat16): _BFLOAT16,
    (90, torch.float16): _FLOAT16_HOPPER,
    (80, torch.float16): _FLOAT16,
    (90, torch.float32): _FLOAT32,
    (80, torch.float32): _FLOAT32,
}
_FLOAT64 = Tile(16, 16, 4, 1)
# Row products have no tile of scores.
_ROWS = Tile(32, 16, 4, 1)
# For devices with less memory than those of their architecture.
_SMALLEST = Tile(16, 16, 4, 1)
# Unequal sizes reveal code that confuses them; small sizes give small tensors several tiles.
_INTERPRETED = Tile(16, 32, 1, 1)


def tiles(kind: str, dtype: torch.dtype, head: int, device: torch.device, options: bool) -> tuple[Tile, ...]:
    """Return the tile of a pass, and one to use if the device has too little memory for it."""
    if triton.knobs.runtime.interpret:
        return (_INTERPRETED,)
    first = chosen(kind, dtype, head, architecture(device), options)
    if not tunes() or kind == "rows":
        return first, _SMALLEST
    others = [tile for (key, _), table in _TILES.items() if key == architecture(device) for tile in table[kind]]
    return tuple(dict.fromkeys((first, *others, _SMALLEST)))


def tunes() -> bool:
    """Whether the user asks to time several tiles at the first call of each signature."""
    return os.environ.get("HODIFF_TUNE_TILES") == "1" and not triton.knobs.runtime.interpret


def chosen(kind: str, dtype: torch.dtype, head: int, architecture: int, options: bool) -> Tile:
    """Return the tile of a pass; `options` says whether there is a mask, a cap of scores or dropout."""
    if kind == "rows":
        return _ROWS
    if dtype == torch.float64:
        return _FLOAT64
    column = next(place for place, most in enumerate(_HEADS) if head <= most)
    return _TILES[architecture, dtype][kind][min(column + options, len(_HEADS) - 1)]


def architecture(device: torch.device) -> int:
    """Return the key of the tables for a device: 90 for Hopper, whose tensor cores multiply larger tiles, else 80."""
    hopper = torch.version.hip is None and torch.cuda.get_device_capability(device)[0] == 9
    return 90 if hopper else 80
