# mypy: allow-untyped-defs, allow-incomplete-defs
r"""The first pass over the tiles of attention, one program per tile of queries: the output and row sums.

It computes $O$, $\dot O$, and the row statistics that `triton_gradients` needs: the greatest score, the inverse of
$\sum_j e^{s_j - \max s}$, and three sums, $\delta(\bar P)$, $\delta(\dot S)$ and $\dot\delta(\bar P)$.

The greatest score and the sum are stored separately, not as the logarithm of the sum of exponentials. In a row that a
mask lowers by nearly the range of float32, that logarithm has no digits left to distinguish one key from many.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hodiff.kernels.attention.triton_blocks import LENGTHS
from hodiff.kernels.attention.triton_tiles import (
    exponential,
    kept,
    keys_in_sight,
    opened,
    rows_of,
    scores,
    scores_tangent,
    seed_of,
    store_rows,
    thinned,
    weighted,
)


@triton.jit(do_not_specialize=LENGTHS)
def output_pass(
    q,
    k,
    v,
    mask,
    seed,
    g,
    q_t,
    k_t,
    v_t,
    g_t,
    out,
    out_t,
    top,
    inverse,
    bar,
    mean,
    bar_t,
    sizes,
    numbering,
    length,
    keys,
    low,
    high,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    UNIT: tl.constexpr,
    THRESHOLD: tl.constexpr,
    FACTOR: tl.constexpr,
    E: tl.constexpr,
    F: tl.constexpr,
    PADDED_E: tl.constexpr,
    PADDED_F: tl.constexpr,
    ACC: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    r"""Compute the output by running maxima; $\dot O = (P \circ \dot S) V + P \dot V - \delta(\dot S) O$."""
    tiles = tl.cdiv(length, ROWS)
    batch = tl.program_id(0) // tiles
    first = tl.program_id(0) % tiles * ROWS
    query = first + tl.arange(0, ROWS)[:, None]
    q, k, v = opened(q, sizes, batch), opened(k, sizes, batch), opened(v, sizes, batch)
    q_t = q_t if q_t is None else opened(q_t, sizes, batch)
    k_t = k_t if k_t is None else opened(k_t, sizes, batch)
    v_t = v_t if v_t is None else opened(v_t, sizes, batch)
    mask = mask if mask is None else opened(mask, sizes, batch)
    seed = seed if seed is None else seed_of(seed, numbering, sizes, batch)
    q = rows_of(q, first, length, E, ROWS, PADDED_E)
    q_t = q_t if q_t is None else rows_of(q_t, first, length, E, ROWS, PADDED_E)

    highest = tl.full((ROWS,), float("-inf"), ACC)
    total, centre = tl.zeros((ROWS,), ACC), tl.zeros((ROWS,), ACC)
    o, o_t = tl.zeros((ROWS, PADDED_F), ACC), tl.zeros((ROWS, PADDED_F), ACC)
    begin, whole, end = keys_in_sight(first, keys, low, high, SPLIT, ROWS, KEYS)
    for EDGE in tl.static_range(2):
        # The first loop has no comparisons of keys and queries.
        if EDGE or SPLIT:
            for start in range(whole if EDGE else begin, end if EDGE else whole, KEYS):
                key = start + tl.arange(0, KEYS)[None, :]
                k_tile = rows_of(k, start, keys, E, KEYS, PADDED_E)
                v_tile = rows_of(v, start, keys, F, KEYS, PADDED_F)
                s, bend = scores(
                    q, k_tile, mask, query, key, length, keys, low, high, EDGE, SCALE, SOFTCAP, UNIT, ACC, False
                )
                higher = tl.maximum(highest, tl.max(s, 1))
                # For a row that has seen no key yet, -inf minus -inf would be NaN.
                level = tl.where(higher == float("-inf"), 0.0, higher)
                p = exponential(s - level[:, None], UNIT)
                fading = exponential(highest - level, UNIT)
                keep = seed if seed is None else kept(seed, query, key, THRESHOLD, FACTOR, ACC)
                thin = thinned(p, keep)
                total = total * fading + tl.sum(p, 1)
                o = weighted(o * fading[:, None], thin, v_tile, ACC)
                k_t_tile = k_t if k_t is None else rows_of(k_t, start, keys, E, KEYS, PADDED_E)
                o_t = o_t * fading[:, None]
                if q_t is not None or k_t is not None:
                    s_t = scores_tangent(q, k_tile, q_t, k_t_tile, bend, SCALE, SOFTCAP, ACC, False)
                    centre = centre * fading + tl.sum(p * s_t, 1)
                    o_t = weighted(o_t, thin * s_t, v_tile, ACC)
                if v_t is not None:
                    o_t = weighted(o_t, thin, rows_of(v_t, start, keys, F, KEYS, PADDED_F), ACC)
                highest = higher

    # A row that sees no key returns zeros.
    once = tl.where(total == 0, 0.0, 1 / tl.where(total == 0, 1.0, total))
    o = o * once[:, None]
    centre = centre * once
    o_t = o_t * once[:, None] - centre[:, None] * o
    if out is not None:
        store_rows(opened(out, sizes, batch), first, length, o, F, ROWS, PADDED_F)
    if out_t is not None:
        store_rows(opened(out_t, sizes, batch), first, length, o_t, F, ROWS, PADDED_F)
    if top is not None:
        row = first + tl.arange(0, ROWS)
        inside = row < length
        at = batch.to(tl.int64) * length + row
        tl.store(top + at, tl.where(highest == float("-inf"), 0.0, highest), mask=inside)
        tl.store(inverse + at, once, mask=inside)
        if mean is not None:
            tl.store(mean + at, centre, mask=inside)
        if bar is not None:
            g_tile = rows_of(opened(g, sizes, batch), first, length, F, ROWS, PADDED_F).to(ACC)
            tl.store(bar + at, tl.sum(g_tile * o, 1), mask=inside)
            if bar_t is not None:
                moved = tl.sum(g_tile * o_t, 1)
                if g_t is not None:
                    g_t_tile = rows_of(opened(g_t, sizes, batch), first, length, F, ROWS, PADDED_F)
                    moved += tl.sum(g_t_tile.to(ACC) * o, 1)
                tl.store(bar_t + at, moved, mask=inside)


@triton.jit(do_not_specialize=LENGTHS)
def row_products(
    g,
    out,
    bar,
    sizes,
    length,
    F: tl.constexpr,
    PADDED_F: tl.constexpr,
    ACC: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    r"""Compute $\delta(\bar P)$, the row sums of $G \circ O$, from a saved output."""
    tiles = tl.cdiv(length, ROWS)
    batch = tl.program_id(0) // tiles
    first = tl.program_id(0) % tiles * ROWS
    g = rows_of(opened(g, sizes, batch), first, length, F, ROWS, PADDED_F).to(ACC)
    out = rows_of(opened(out, sizes, batch), first, length, F, ROWS, PADDED_F).to(ACC)
    row = first + tl.arange(0, ROWS)
    tl.store(bar + batch.to(tl.int64) * length + row, tl.sum(g * out, 1), mask=row < length)
