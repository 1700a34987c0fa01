# mypy: allow-untyped-defs, allow-incomplete-defs
r"""Passes over the tiles of attention that compute its gradients or their tangents, and recompute the weights.

- `keys_pass`, one program per tile of keys: $\bar K, \bar V$;
- `queries_pass`, one program per tile of queries: $\bar Q$.

Both read the row statistics of `triton_output`. They differ only in the tile that a program holds and the tiles that it
loops over. Triton supports no packed arguments, so each pass lists its own.
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
    pairs,
    pairs_tangent,
    queries_in_sight,
    rows_of,
    scores,
    scores_tangent,
    seed_of,
    store_rows,
    thinned,
    through_cap,
    weighted,
)


@triton.jit
def pulled_back(v, g, p, bend, keep, bar, SOFTCAP: tl.constexpr, ACC: tl.constexpr, TURNED: tl.constexpr):
    r"""Compute $\bar P - \delta(\bar P)$ and $\bar U$."""
    above = thinned(pairs(g, v, None, ACC, TURNED), keep) - bar
    return above, through_cap(p * above, bend, SOFTCAP)


@triton.jit
def pulled_back_tangent(
    v,
    g,
    v_t,
    g_t,
    p,
    above,
    ahead,
    bend,
    keep,
    mean,
    bar_t,
    SOFTCAP: tl.constexpr,
    ACC: tl.constexpr,
    TURNED: tl.constexpr,
):
    r"""Compute $\dot{\bar U}$, where `ahead` is $\dot S - \delta(\dot S)$ or None."""
    # Few tiles fit into the registers, so the products add to what needs the tiles computed before.
    w = -bar_t
    if ahead is not None:
        w = ahead * above - bar_t
    if g_t is not None or v_t is not None:
        if keep is None:
            if ahead is None:
                w = pairs_tangent(g, v, g_t, v_t, None, ACC, TURNED) + w
            else:
                w = pairs_tangent(g, v, g_t, v_t, w, ACC, TURNED)
        else:
            w = thinned(pairs_tangent(g, v, g_t, v_t, None, ACC, TURNED), keep) + w
    w = through_cap(w, bend, SOFTCAP)
    if SOFTCAP is not None and ahead is not None:
        # The slope of the cap has a tangent as well: tanh'' = -2 tanh tanh'.
        w += (-2 / SOFTCAP) * bend * (ahead + mean) * above
    return p * w


@triton.jit
def row_numbers(numbers, at, inside):
    """Load the numbers of some queries, zero past the last."""
    return tl.load(numbers + at, mask=inside, other=0.0)


@triton.jit(do_not_specialize=LENGTHS)
def keys_pass(
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
    by_k,
    by_v,
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
    TANGENT: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    r"""Compute $\bar K = s \bar U^\top Q$ and $\bar V = P^\top G$, or their tangents."""
    tiles = tl.cdiv(keys, KEYS)
    batch = tl.program_id(0) // tiles
    first = tl.program_id(0) % tiles * KEYS
    key = first + tl.arange(0, KEYS)[:, None]
    q, k, v, g = opened(q, sizes, batch), opened(k, sizes, batch), opened(v, sizes, batch), opened(g, sizes, batch)
    q_t = q_t if q_t is None else opened(q_t, sizes, batch)
    k_t = k_t if k_t is None else opened(k_t, sizes, batch)
    v_t = v_t if v_t is None else opened(v_t, sizes, batch)
    g_t = g_t if g_t is None else opened(g_t, sizes, batch)
    mask = mask if mask is None else opened(mask, sizes, batch)
    seed = seed if seed is None else seed_of(seed, numbering, sizes, batch)
    k = rows_of(k, first, keys, E, KEYS, PADDED_E)
    v = rows_of(v, first, keys, F, KEYS, PADDED_F)
    k_t = k_t if k_t is None else rows_of(k_t, first, keys, E, KEYS, PADDED_E)
    v_t = v_t if v_t is None else rows_of(v_t, first, keys, F, KEYS, PADDED_F)

    k_sum, v_sum = tl.zeros((KEYS, PADDED_E), ACC), tl.zeros((KEYS, PADDED_F), ACC)
    begin, whole, end = queries_in_sight(first, length, low, high, SPLIT, ROWS, KEYS)
    for WHOLE in tl.static_range(2):
        # The second loop has no comparisons of keys and queries.
        if WHOLE == 0 or SPLIT:
            for start in range(whole if WHOLE else begin, end if WHOLE else whole, ROWS):
                query = start + tl.arange(0, ROWS)[None, :]
                q_tile = rows_of(q, start, length, E, ROWS, PADDED_E)
                g_tile = rows_of(g, start, length, F, ROWS, PADDED_F)
                q_t_tile = q_t if q_t is None else rows_of(q_t, start, length, E, ROWS, PADDED_E)
                g_t_tile = g_t if g_t is None else rows_of(g_t, start, length, F, ROWS, PADDED_F)
                at, inside = batch.to(tl.int64) * length + query, query < length
                s, bend = scores(
                    q_tile, k, mask, query, key, length, keys, low, high, WHOLE == 0, SCALE, SOFTCAP, UNIT, ACC, True
                )
                p = exponential(s - row_numbers(top, at, inside), UNIT) * row_numbers(inverse, at, inside)
                keep = seed if seed is None else kept(seed, query, key, THRESHOLD, FACTOR, ACC)
                centre = mean if mean is None else row_numbers(mean, at, inside)
                ahead = None
                if TANGENT and (q_t is not None or k_t is not None):
                    ahead = scores_tangent(q_tile, k, q_t_tile, k_t, bend, SCALE, SOFTCAP, ACC, True) - centre
                if by_v is not None:
                    if TANGENT:
                        if ahead is not None:
                            v_sum = weighted(v_sum, thinned(p * ahead, keep), g_tile, ACC)
                        if g_t is not None:
                            v_sum = weighted(v_sum, thinned(p, keep), g_t_tile, ACC)
                    else:
                        v_sum = weighted(v_sum, thinned(p, keep), g_tile, ACC)
                if by_k is not None:
                    above, u_bar = pulled_back(
                        v, g_tile, p, bend, keep, row_numbers(bar, at, inside), SOFTCAP, ACC, True
                    )
                    if TANGENT:
                        if q_t is not None:
                            k_sum = weighted(k_sum, u_bar, q_t_tile, ACC)
                        moved = row_numbers(bar_t, at, inside)
                        u_bar_t = pulled_back_tangent(
                            v, g_tile, v_t, g_t_tile, p, above, ahead, bend, keep, centre, moved, SOFTCAP, ACC, True
                        )
                        k_sum = weighted(k_sum, u_bar_t, q_tile, ACC)
                    else:
                        k_sum = weighted(k_sum, u_bar, q_tile, ACC)

    if by_k is not None:
        store_rows(opened(by_k, sizes, batch), first, keys, SCALE * k_sum, E, KEYS, PADDED_E)
    if by_v is not None:
        store_rows(opened(by_v, sizes, batch), first, keys, v_sum, F, KEYS, PADDED_F)


@triton.jit(do_not_specialize=LENGTHS)
def queries_pass(
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
    by_q,
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
    TANGENT: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    r"""Compute $\bar Q = s \bar U K$, or its tangent."""
    tiles = tl.cdiv(length, ROWS)
    batch = tl.program_id(0) // tiles
    first = tl.program_id(0) % tiles * ROWS
    query = first + tl.arange(0, ROWS)[:, None]
    q, k, v, g = opened(q, sizes, batch), opened(k, sizes, batch), opened(v, sizes, batch), opened(g, sizes, batch)
    q_t = q_t if q_t is None else opened(q_t, sizes, batch)
    k_t = k_t if k_t is None else opened(k_t, sizes, batch)
    v_t = v_t if v_t is None else opened(v_t, sizes, batch)
    g_t = g_t if g_t is None else opened(g_t, sizes, batch)
    mask = mask if mask is None else opened(mask, sizes, batch)
    seed = seed if seed is None else seed_of(seed, numbering, sizes, batch)
    q = rows_of(q, first, length, E, ROWS, PADDED_E)
    g = rows_of(g, first, length, F, ROWS, PADDED_F)
    q_t = q_t if q_t is None else rows_of(q_t, first, length, E, ROWS, PADDED_E)
    g_t = g_t if g_t is None else rows_of(g_t, first, length, F, ROWS, PADDED_F)
    at, inside = batch.to(tl.int64) * length + query, query < length
    level, once = row_numbers(top, at, inside), row_numbers(inverse, at, inside)
    bar = row_numbers(bar, at, inside)
    centre = mean if mean is None else row_numbers(mean, at, inside)
    bar_t = bar_t if bar_t is None else row_numbers(bar_t, at, inside)

    q_sum = tl.zeros((ROWS, PADDED_E), ACC)
    begin, whole, end = keys_in_sight(first, keys, low, high, SPLIT, ROWS, KEYS)
    for EDGE in tl.static_range(2):
        # The first loop has no comparisons of keys and queries.
        if EDGE or SPLIT:
            for start in range(whole if EDGE else begin, end if EDGE else whole, KEYS):
                key = start + tl.arange(0, KEYS)[None, :]
                k_tile = rows_of(k, start, keys, E, KEYS, PADDED_E)
                v_tile = rows_of(v, start, keys, F, KEYS, PADDED_F)
                k_t_tile = k_t if k_t is None else rows_of(k_t, start, keys, E, KEYS, PADDED_E)
                v_t_tile = v_t if v_t is None else rows_of(v_t, start, keys, F, KEYS, PADDED_F)
                s, bend = scores(
                    q, k_tile, mask, query, key, length, keys, low, high, EDGE, SCALE, SOFTCAP, UNIT, ACC, False
                )
                p = exponential(s - level, UNIT) * once
                keep = seed if seed is None else kept(seed, query, key, THRESHOLD, FACTOR, ACC)
                ahead = None
                if TANGENT and (q_t is not None or k_t is not None):
                    ahead = scores_tangent(q, k_tile, q_t, k_t_tile, bend, SCALE, SOFTCAP, ACC, False) - centre
                above, u_bar = pulled_back(v_tile, g, p, bend, keep, bar, SOFTCAP, ACC, False)
                if TANGENT:
                    if k_t is not None:
                        q_sum = weighted(q_sum, u_bar, k_t_tile, ACC)
                    u_bar_t = pulled_back_tangent(
                        v_tile, g, v_t_tile, g_t, p, above, ahead, bend, keep, centre, bar_t, SOFTCAP, ACC, False
                    )
                    q_sum = weighted(q_sum, u_bar_t, k_tile, ACC)
                else:
                    q_sum = weighted(q_sum, u_bar, k_tile, ACC)
    store_rows(opened(by_q, sizes, batch), first, length, SCALE * q_sum, E, ROWS, PADDED_E)
