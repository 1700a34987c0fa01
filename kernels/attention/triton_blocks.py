"""How many queries and keys make a tile: a few sizes to choose from on a GPU, one in Triton's interpreter."""

from __future__ import annotations

import triton

# Queries, keys, warps, stages of the pipeline. What asks for more memory than the GPU has is passed over; the last
# fits in any.
_ON_A_GPU = (
    (128, 64, 8, 2),
    (64, 64, 4, 2),
    (64, 64, 8, 1),
    (32, 64, 4, 2),
    (64, 32, 4, 2),
    (32, 32, 4, 1),
    (16, 16, 4, 1),
)
# Unlike, so that one taken for the other is seen; small, so that small tests have several.
_INTERPRETED = ((16, 32, 1, 1),)


def _choices() -> list[triton.Config]:
    chosen = _INTERPRETED if triton.knobs.runtime.interpret else _ON_A_GPU
    return [
        triton.Config({"ROWS": rows, "KEYS": keys}, num_warps=warps, num_stages=stages)
        for rows, keys, warps, stages in chosen
    ]


# Lengths are no part of the key: a new one in every batch must not time all choices again.
tuned = triton.autotune(configs=_choices(), key=["E", "F", "VARIANT"])
