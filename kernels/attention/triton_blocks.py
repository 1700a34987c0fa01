"""Sizes of tiles: a few to choose from on a GPU, one in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import torch
import triton

# Arguments that change from batch to batch; a kernel compiled for one value serves all.
LENGTHS = ("length", "keys", "low", "high")

# Queries, keys, warps and pipeline stages, by whether numbers have 16 bits, and heads at most 128 numbers. Parts of
# float32, and float64, take more registers. Choices that need more memory than the GPU has are skipped.
_ON_A_GPU = {
    (True, True): ((128, 64, 8, 2), (64, 64, 4, 2), (64, 32, 4, 2), (32, 32, 4, 1)),
    (True, False): ((64, 32, 4, 2), (32, 32, 8, 1), (16, 16, 4, 1)),
    (False, True): ((32, 32, 4, 1), (16, 32, 4, 1), (16, 16, 4, 1)),
    (False, False): ((16, 16, 4, 1),),
}
# Unequal sizes reveal code that confuses them; small sizes give small tensors several tiles.
_INTERPRETED = ((16, 32, 1, 1),)


def _configs(sizes: tuple[tuple[int, ...], ...]) -> list[Any]:
    return [
        triton.Config({"ROWS": rows, "KEYS": keys}, num_warps=warps, num_stages=stages)
        for rows, keys, warps, stages in sizes
    ]


_CHOICES = {kind: _configs(sizes) for kind, sizes in _ON_A_GPU.items()}


def choices(configs: list[Any], named: dict[str, Any], **arguments: Any) -> list[Any]:
    """Select the configurations for a call's dtype and head size."""
    del configs
    arguments = named | arguments
    narrow = arguments["q"][0].dtype in {torch.float16, torch.bfloat16}
    return _CHOICES[narrow, max(arguments["E"], arguments["F"]) <= 128]


# Lengths are not part of the key: a new length in every batch must not time all choices again. Triton does not call
# `choices` for a single configuration, as in the interpreter.
tuned = triton.autotune(
    configs=_configs(_INTERPRETED if triton.knobs.runtime.interpret else sum(_ON_A_GPU.values(), ())),
    key=["E", "F", "VARIANT"],
    prune_configs_by={"early_config_prune": choices},
)
