# mypy: allow-untyped-defs, allow-incomplete-defs
r"""Passes over the rows of a tile of logits on a GPU, each of which reads the tile once.

`terms_pass` computes $\log \sum_k e^{z_k}$, or the mean $\langle P, \dot z \rangle$ of a tangent, and the number at the
target, one program per row. `cotangent_pass` computes $\gamma P + \tau e_t + \rho$ and its tangent
$P (\gamma \dot z - m) + \dot\tau e_t + \dot\rho$, one program per tile of ROWS by KEYS logits. Numbers of rows are
passed with the distance from one row to the next; the three of a cotangent are neighbours.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Compiled code depends on whether rows begin at multiples of 16 numbers, and on no other size.
_SIZES = ("rows", "first", "lse_step", "g_step", "mean_step", "g_t_step", "target_step")


@triton.jit(do_not_specialize=_SIZES)
def terms_pass(
    z,
    z_t,
    lse,
    target,
    out,
    rows,
    columns,
    first,
    lse_step,
    target_step,
    IGNORE: tl.constexpr,
    SMOOTHED: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Store log-sum-exp (or mean of the tangent), number at the target and, if SMOOTHED, sum of ROWS rows."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    start = row.to(tl.int64)[:, None] * columns
    # Log-sum-exp of the columns so far: its greatest logit, and the sum of exponentials below it.
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    whole = tl.zeros((ROWS,), tl.float32)
    if z_t is not None:
        known = tl.load(lse + row * lse_step, mask=inside, other=0.0)
    for begin in range(0, columns, KEYS):
        column = begin + tl.arange(0, KEYS)
        here = inside[:, None] & (column < columns)[None, :]
        logits = tl.load(z + start + column[None, :], mask=here, other=float("-inf"))
        if z_t is not None:
            numbers = tl.load(z_t + start + column[None, :], mask=here, other=0.0)
            # A product with 0 would make NaN of an infinite tangent outside of the tile.
            total += tl.sum(tl.where(here, tl.exp(logits - known[:, None]) * numbers, 0.0), 1)
        else:
            numbers = tl.where(here, logits, 0.0)
            above = tl.maximum(top, tl.max(logits, 1))
            # Differences of infinities would be NaN.
            shift = tl.where(tl.abs(above) == float("inf"), 0.0, above)
            total = total * tl.exp(top - shift) + tl.sum(tl.exp(logits - shift[:, None]), 1)
            top = above
        if SMOOTHED:
            whole += tl.sum(numbers, 1)
    if z_t is None:
        shift = tl.where(tl.abs(top) == float("inf"), 0.0, top)
        # The interpreter warns of log(0).
        total = tl.where(total == 0.0, float("-inf"), shift + tl.log(tl.where(total == 0.0, 1.0, total)))
    label = tl.load(target + row * target_step, mask=inside, other=IGNORE)
    place = label - first
    hit = inside & (label != IGNORE) & (place >= 0) & (place < columns)
    at = row.to(tl.int64) * columns + place
    number = tl.load((z if z_t is None else z_t) + at, mask=hit, other=0.0)
    width = 3 if SMOOTHED else 2
    tl.store(out + row * width, total, mask=inside)
    tl.store(out + row * width + 1, number, mask=inside)
    if SMOOTHED:
        tl.store(out + row * width + 2, whole, mask=inside)


@triton.jit(do_not_specialize=_SIZES)
def cotangent_pass(
    z,
    z_t,
    lse,
    g,
    mean,
    g_t,
    target,
    out,
    out_t,
    rows,
    columns,
    first,
    lse_step,
    g_step,
    mean_step,
    g_t_step,
    target_step,
    IGNORE: tl.constexpr,
    SMOOTHED: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Store the cotangent of a tile of logits and, with a tangent, the tangent of the cotangent."""
    across = tl.cdiv(columns, KEYS)
    row = (tl.program_id(0) // across) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(0) % across) * KEYS + tl.arange(0, KEYS)
    inside = row < rows
    here = inside[:, None] & (column < columns)[None, :]
    at = row.to(tl.int64)[:, None] * columns + column[None, :]
    label = tl.load(target + row * target_step, mask=inside, other=IGNORE)
    hit = (column[None, :] == (label - first)[:, None]) & (label != IGNORE)[:, None]
    scale = tl.load(g + row * g_step, mask=inside, other=0.0)[:, None]
    p = tl.exp(
        tl.load(z + at, mask=here, other=float("-inf")) - tl.load(lse + row * lse_step, mask=inside, other=0.0)[:, None]
    )
    if out is not None:
        value = scale * p + tl.where(hit, tl.load(g + row * g_step + 1, mask=inside, other=0.0)[:, None], 0.0)
        if SMOOTHED:
            value += tl.load(g + row * g_step + 2, mask=inside, other=0.0)[:, None]
        tl.store(out + at, value.to(out.dtype.element_ty), mask=here)
    if z_t is not None:
        middle = tl.load(mean + row * mean_step, mask=inside, other=0.0)[:, None]
        value = p * (scale * tl.load(z_t + at, mask=here, other=0.0) - middle)
        if g_t is not None:
            value += tl.where(hit, tl.load(g_t + row * g_t_step + 1, mask=inside, other=0.0)[:, None], 0.0)
            if SMOOTHED:
                value += tl.load(g_t + row * g_t_step + 2, mask=inside, other=0.0)[:, None]
        tl.store(out_t + at, value.to(out_t.dtype.element_ty), mask=here)
