# mypy: allow-untyped-defs, allow-incomplete-defs
r"""The formulas of attention on one tile of queries and keys.

A tile has queries along its rows or, if TURNED, keys, so that no product needs a transposed tile. Numbers of a query
then broadcast along the other axis. Elementwise formulas are the same for both.
A tensor is passed as (first element, strides of its batch dimensions with the last one first, stride of its rows,
stride of its columns); None is zero, and Triton compiles the formula without it.
Scores are $S = c \tanh(U / c) + M$ with $U = s Q K^\top$, or $U + M$ without a cap.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

# Precision of float32 products. "tf32x3" uses tensor cores in three products of parts of 11 bits, which about doubles
# the error of a sum of 64 to 1024 terms. "ieee" needs many times the available registers, and on some tiles LLVM in
# Triton 3.9 aborts the process. It is the only precision that all of AMD's cores support.
FLOAT32 = tl.constexpr("ieee" if torch.version.hip else "tf32x3")
# Precision for numbers that have no more than these 11 bits, or need no more.
ROUNDED = tl.constexpr("ieee" if torch.version.hip else "tf32")
# GPUs compute powers of 2.
LOG2E = tl.constexpr(math.log2(math.e))
# The interpreter would multiply the bits of bfloat16 as integers.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def opened(tensor, sizes, batch):
    """Select one batch index of a tensor: (first element, stride of rows, stride of columns)."""
    return tensor[0] + place(tensor[1], sizes, batch), tensor[2], tensor[3]


@triton.jit
def place(strides, sizes, batch):
    """Compute the offset of a batch index."""
    offset = tl.zeros((), tl.int64)
    for dim in tl.static_range(len(sizes)):
        offset += (batch % sizes[dim]).to(tl.int64) * strides[dim]
        batch = batch // sizes[dim]
    return offset


@triton.jit
def rows_of(matrix, first, length, SIZE: tl.constexpr, ROWS: tl.constexpr, PADDED: tl.constexpr):
    """Load rows from `first` on, (ROWS, PADDED), with zeros around the matrix."""
    at, inside = _places(matrix, first, length, SIZE, ROWS, PADDED)
    return tl.load(at, mask=inside, other=0.0)


@triton.jit
def store_rows(matrix, first, length, values, SIZE: tl.constexpr, ROWS: tl.constexpr, PADDED: tl.constexpr):
    """Store rows from `first` on, inside the matrix."""
    at, inside = _places(matrix, first, length, SIZE, ROWS, PADDED)
    tl.store(at, values, mask=inside)


@triton.jit
def _places(matrix, first, length, SIZE: tl.constexpr, ROWS: tl.constexpr, PADDED: tl.constexpr):
    row, column = tl.arange(0, ROWS), tl.arange(0, PADDED)
    # Only the beginning of a tile may be more than 2**31 elements from the start.
    start = matrix[0] + (tl.zeros((), tl.int64) + first) * matrix[1]
    inside = (row < length - first)[:, None]
    if SIZE != PADDED:
        inside = inside & (column < SIZE)[None, :]
    return start + row[:, None] * matrix[1] + column[None, :] * matrix[2], inside


@triton.jit
def keys_in_sight(first, keys, low, high, SPLIT: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """Return the beginning and end of the tiles of keys, and, if SPLIT, the end of those that all queries see.

    Each tile begins at a multiple of KEYS. SPLIT excludes lower bounds and masks, which may hide keys of any tile.
    """
    begin, end = 0, keys
    if low is not None:
        begin = tl.maximum(first + low, 0) // KEYS * KEYS
    if high is not None:
        end = tl.minimum(keys, first + ROWS + high)
    whole = begin
    if SPLIT:
        whole = keys // KEYS * KEYS
        if high is not None:
            whole = tl.minimum(whole, tl.maximum(first + high + 1, 0) // KEYS * KEYS)
    return begin, whole, end


@triton.jit
def queries_in_sight(first, length, low, high, SPLIT: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """Return the beginning and end of the tiles of queries, and, if SPLIT, the beginning of those that see all keys.

    Each tile begins at a multiple of ROWS. Queries and keys past the last need no comparison: their loaded numbers are
    0, so they add 0, or contribute to sums that are not stored.
    """
    begin, end = 0, length
    if high is not None:
        begin = tl.maximum(first - high, 0) // ROWS * ROWS
    if low is not None:
        end = tl.minimum(length, first + KEYS - low)
    whole = end
    if SPLIT:
        whole = tl.cdiv(tl.maximum(first + KEYS - 1 - high, 0), ROWS) * ROWS
    return begin, tl.minimum(whole, tl.maximum(begin, end)), end


@triton.jit
def pairs(a, b, total, ACC: tl.constexpr, TURNED: tl.constexpr):
    r"""Compute $A B^\top$, or its transpose, plus a total; a total of None is zero."""
    a, b = factor(a), factor(b)
    if TURNED:
        return tl.dot(b, tl.trans(a), total, input_precision=FLOAT32, out_dtype=ACC)
    else:  # noqa: RET505 - Triton compiles one of two branches, but all of what follows a branch.
        return tl.dot(a, tl.trans(b), total, input_precision=FLOAT32, out_dtype=ACC)


@triton.jit
def factor(a):
    """Convert a factor to a dtype that the hardware, or the interpreter, multiplies."""
    if INTERPRETED:
        return a.to(tl.float32) if a.dtype == tl.bfloat16 else a
    else:  # noqa: RET505
        return a


@triton.jit
def pairs_tangent(a, b, a_t, b_t, total, ACC: tl.constexpr, TURNED: tl.constexpr):
    r"""Compute $\dot A B^\top + A \dot B^\top$ plus a total; one tangent, and the total, may be None."""
    if b_t is None:
        return pairs(a_t, b, total, ACC, TURNED)
    elif a_t is None:  # noqa: RET505
        return pairs(a, b_t, total, ACC, TURNED)
    else:
        return pairs(a, b_t, pairs(a_t, b, total, ACC, TURNED), ACC, TURNED)


@triton.jit
def weighted(total, weights, values, ACC: tl.constexpr):
    """Compute $T + W X$ for computed numbers W."""
    # Computed numbers have the range of float32. Bfloat16 has the same range; float16 does not, but its 11 bits fit in
    # TF32.
    if values.dtype == tl.float16:
        return tl.dot(weights, values.to(tl.float32), total, input_precision=ROUNDED, out_dtype=ACC)
    else:  # noqa: RET505
        return tl.dot(factor(weights.to(values.dtype)), factor(values), total, input_precision=FLOAT32, out_dtype=ACC)


@triton.jit
def scores(
    q,
    k,
    mask,
    query,
    key,
    length,
    keys,
    low,
    high,
    EDGE: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    UNIT: tl.constexpr,
    ACC: tl.constexpr,
    TURNED: tl.constexpr,
):
    r"""Compute $S$ times UNIT, -inf where a query does not see a key, and $\tanh(U / c)$, meaningless without a cap."""
    # Without EDGE, neither the band nor the number of keys hides a pair of this tile.
    if SOFTCAP is None:
        s = pairs(q, k, None, ACC, TURNED) * (SCALE * UNIT)
        bend = s
    else:
        bend = tanh(pairs(q, k, None, ACC, TURNED) * (SCALE / SOFTCAP))
        s = bend * (SOFTCAP * UNIT)
    if mask is not None:
        seen = visible(query, key, keys, low, high) & (query < length)
        at = mask[0] + query.to(tl.int64) * mask[1] + key.to(tl.int64) * mask[2]
        given = tl.load(at, mask=seen, other=0)
        if given.dtype.is_floating():
            s += given.to(ACC)
        else:
            seen = seen & (given != 0)
        s = tl.where(seen, s, float("-inf"))
    elif EDGE:  # noqa: SIM102 - Triton compiles both sides of an `and`.
        # A pass that holds keys does not store the sums of keys past the last.
        if not TURNED or low is not None or high is not None:
            s = tl.where(visible(query, key, keys, low, high), s, float("-inf"))
    return s, bend


@triton.jit
def visible(query, key, keys, low, high):
    """Whether each pair is within the band, and its key exists."""
    seen = key < keys
    if low is not None:
        seen = seen & (key - query >= low)
    if high is not None:
        seen = seen & (key - query <= high)
    return seen


@triton.jit
def exponential(s, UNIT: tl.constexpr):
    """Compute $e^x$ of differences x of scores, given times UNIT."""
    return tl.exp2(s * (LOG2E / UNIT))


@triton.jit
def scores_tangent(
    q, k, q_t, k_t, bend, SCALE: tl.constexpr, SOFTCAP: tl.constexpr, ACC: tl.constexpr, TURNED: tl.constexpr
):
    r"""Compute $\dot S$; one of $\dot Q$ and $\dot K$ may be None."""
    return through_cap(SCALE * pairs_tangent(q, k, q_t, k_t, None, ACC, TURNED), bend, SOFTCAP)


@triton.jit
def through_cap(t, bend, SOFTCAP: tl.constexpr):
    r"""Compute $(1 - \tanh^2) t$, which maps $\dot U$ to $\dot S$ and $\bar S$ to $\bar U$."""
    if SOFTCAP is None:
        return t
    else:  # noqa: RET505
        return (1 - bend * bend) * t


@triton.jit
def tanh(x):
    """Compute tanh with a small relative error, also where `1 - exp` would cancel."""
    # A continued fraction of tanh, cut after seven terms: 1e-16 up to 0.3.
    y = x * x
    small = x * (135135 + y * (17325 + y * (378 + y))) / (135135 + y * (62370 + y * (3150 + y * 28)))
    e = tl.exp(-2 * tl.abs(x))
    large = (1 - e) / (1 + e)
    return tl.where(y < 0.09, small, tl.where(x < 0, -large, large))


@triton.jit
def kept(seed, query, key, THRESHOLD: tl.constexpr, FACTOR: tl.constexpr, ACC: tl.constexpr):
    """Compute dropout factors by the same hash of counters as `hodiff.functions.attention.dropout.kept`."""
    row = mixed(seed + query.to(tl.uint32))
    drawn = mixed(row + key.to(tl.uint32) * 0x9E3779B9)
    return (drawn.to(tl.int64) >= THRESHOLD).to(ACC) * FACTOR


@triton.jit
def thinned(p, keep):
    """Apply dropout to weights, or to cotangents of weights."""
    if keep is None:
        return p
    else:  # noqa: RET505
        return p * keep


@triton.jit
def mixed(x):
    """Mix 32 bits."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def seed_of(seed, numbering, sizes, batch):
    """Load the seed of dropout, mixed with the number of the batch."""
    drawn = tl.load(opened(seed, sizes, batch)[0]).to(tl.uint32)
    return mixed(mixed(drawn) + place(numbering, sizes, batch).to(tl.uint32))
