"""How many queries and keys make a tile: a few sizes to choose from on a GPU, one in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import torch
import triton

# Arguments that change from batch to batch: what is compiled for one value serves all.
LENGTHS = ("length", "keys", "low", "high")

# Queries, keys, warps, stages of the pipeline; what asks for more memory than a GPU has is passed over.
_NARROW = ((128, 64, 8, 2), (64, 64, 4, 2), (64, 32, 4, 2), (32, 32, 4, 1))
# Parts of float32, and float64, take more registers.
_WIDE = ((32, 32, 4, 1), (16, 32, 4, 1), (16, 16, 4, 1))
# Unlike, so that one taken for the other is seen; small, so that small tensors have several.
_INTERPRETED = ((16, 32, 1, 1),)


def _configs(sizes: tuple[tuple[int, ...], ...]) -> list[Any]:
    return [
        triton.Config({"ROWS": rows, "KEYS": keys}, num_warps=warps, num_stages=stages)
        for rows, keys, warps, stages in sizes
    ]


_CHOICES = _configs(_INTERPRETED) if triton.knobs.runtime.interpret else _configs(_NARROW + _WIDE)


def _of_dtype(configs: list[Any], named: dict[str, Any], **arguments: Any) -> list[Any]:
    tensor = (named | arguments)["q"][0]
    narrow = tensor.dtype in {torch.float16, torch.bfloat16}
    return configs[: len(_NARROW)] if narrow else configs[len(_NARROW) :]


# Lengths are no part of the key: a new one in every batch must not time all choices again.
tuned = triton.autotune(configs=_CHOICES, key=["E", "F", "VARIANT"], prune_configs_by={"early_config_prune": _of_dtype})
