"""Launches of Triton kernels: by Triton for the first call of a signature, directly for later ones.

Triton inspects every argument of every launch to find the compiled kernel, which takes longer than a small kernel runs.
A caller's key states all that Triton would inspect: dtypes, shapes, strides and alignment of tensors, and constants.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import torch
import triton
from torch import Tensor
from triton.runtime.errors import OutOfResources

from hodiff.kernels.attention.triton_blocks import Tile, tunes

T = TypeVar("T")
# Beyond this number of signatures, all are forgotten: a program whose lengths never repeat must not fill the memory.
MOST = 4096
_COMPILED: dict[Hashable, tuple[Any, tuple[Any, ...]]] = {}


def signature(t: Tensor | None) -> Hashable:
    """Return what the compiled code of a kernel may depend on."""
    return None if t is None else (t.dtype, t.shape, t.stride(), t.data_ptr() % 16)


def store(table: dict[Any, Any], key: Hashable, value: T) -> T:
    """Add an entry to a table of bounded size."""
    if len(table) >= MOST:
        table.clear()
    table[key] = value
    return value


def launch(
    kernel: Any,
    key: Hashable,
    device: torch.device,
    arguments: Sequence[Any],
    describe: Callable[[], tuple[dict[str, Any], Sequence[Tile], Callable[[Tile], int]]],
) -> None:
    """Launch a kernel; only for a new key, `describe` returns its constants, tiles in order, and number of programs."""
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return launch(kernel, key, device, arguments, describe)
    known = _COMPILED.get(key)
    if known is not None:
        compiled, fixed = known
        compiled(*arguments, *fixed)
        return None
    constants, tiles, programs = describe()
    given = dict(zip(kernel.arg_names, arguments, strict=False))

    def run(tile: Tile) -> Any:
        """Launch by Triton, and return the compiled kernel and its constants; the interpreter compiles nothing."""
        grid, named = (programs(tile), 1, 1), constants | {"ROWS": tile.rows, "KEYS": tile.keys}
        options = {} if triton.knobs.runtime.interpret else {"num_warps": tile.warps, "num_stages": tile.stages}
        made = kernel[grid](**given, **named, **options)
        return None if made is None else (made[grid], tuple(named[name] for name in kernel.arg_names[len(arguments) :]))

    for tile in by_time(run, tiles) if tunes() else tiles:
        try:
            found = run(tile)
        except OutOfResources:  # this GPU has less shared memory than those that the tile was chosen for
            if tile is tiles[-1]:
                raise
            continue
        if found is not None:
            store(_COMPILED, key, found)
        break
    return None


def by_time(run: Callable[[Tile], Any], tiles: Sequence[Tile]) -> list[Tile]:
    """Return tiles that the device has room for, the fastest first."""
    times = {}
    for tile in tiles:
        with suppress(OutOfResources):
            times[tile] = triton.testing.do_bench(partial(run, tile))
    return sorted(times, key=times.__getitem__) or [tiles[-1]]
