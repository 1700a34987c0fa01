"""Attention on a CPU, in float32 and float64: what the C++ kernels take, and calling them."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hodiff.kernels.attention import problem
from hodiff.kernels.attention.options import Options
from hodiff.kernels.fused_library import is_plain, run, unwatched

_KERNELS = {torch.float32: "float", torch.float64: "double"}
# Rows of a panel, which is held against all keys: more use a product's operands more often, fewer fit a cache.
HEIGHT = 32
# What rows come in, and the bytes of a line of cache, where memory begins.
_STEP, _LINE = 16, 64
# Bands are compared in integers of a lane.
_FARTHEST = 2**30


def takes(inputs: Mapping[str, Tensor]) -> bool:
    """Whether the kernels may read these tensors, in float32 and float64 once they are converted."""
    if not unwatched():
        return False
    q = inputs["q"]
    return (
        q.is_floating_point()
        and q.dim() - 2 <= problem.BATCH_DIMENSIONS
        and all(is_plain(each) for each in inputs.values())
    )


def attention(
    inputs: Mapping[str, Tensor], results: Sequence[str], options: Options, head_keys: Tensor | None
) -> tuple[Tensor, ...]:
    """Those wanted of "out" and of the gradients by "q", "k" and "v", or their tangents if tangents are given."""
    # Each has the batch of everything together; what was broadcast is for the caller to sum.
    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    batch = torch.broadcast_shapes(*(each.shape[:-2] for each in inputs.values()))
    heads, (length, keys) = math.prod(batch), (q.shape[-2], k.shape[-2])
    height = min(HEIGHT, -(-length // _STEP) * _STEP)
    threads = torch.get_num_threads()
    chunks = _chunks(heads, -(-length // height), threads)
    call = problem.Problem(
        batch=(*[1] * (problem.BATCH_DIMENSIONS - len(batch)), *batch),
        heads=heads,
        length=length,
        keys=keys,
        low=-_FARTHEST if options.low is None else max(options.low, -_FARTHEST),
        high=_FARTHEST if options.high is None else min(options.high, _FARTHEST),
        height=height,
        chunks=chunks,
        threads=min(threads, heads * chunks),
        scale=options.scale,
        softcap=options.softcap or 0.0,
    )
    for name, each in inputs.items():
        setattr(call, name, _described(each))
    if "mask" in inputs:
        call.mask_kind = problem.MASK_KINDS["boolean" if inputs["mask"].dtype == torch.bool else "additive"]
    if head_keys is not None:
        head_keys = head_keys.expand(*batch, 1, 1).contiguous()
        call.head_keys = head_keys.data_ptr()
        call.threshold = min(round(options.dropout_p * 2**32), 2**32 - 1)
        call.kept = 1 / (1 - options.dropout_p) if options.dropout_p < 1 else 0.0
    shapes = {
        "out": (*batch, length, v.shape[-1]),
        "q": (*batch, length, q.shape[-1]),
        "k": (chunks, *batch, keys, k.shape[-1]),
        "v": (chunks, *batch, keys, v.shape[-1]),
    }
    found = {name: q.new_empty(shapes[name]) for name in results}
    for name, each in found.items():
        setattr(call, problem.OUTPUTS[name], each.data_ptr())
    kernel, at = _KERNELS[q.dtype], ctypes.addressof(call)
    memory = q.new_empty(run(f"hodiff_attention_memory_{kernel}", at) * call.threads + _LINE)
    moving = any(name.endswith("_t") for name in inputs)
    run(f"hodiff_attention_{kernel}", at, -(-memory.data_ptr() // _LINE) * _LINE, moving, "g" in inputs)
    return tuple(
        each if name in {"out", "q"} else each[0] if chunks == 1 else each.sum(0) for name, each in found.items()
    )


def _described(tensor: Tensor) -> problem.Tensor:
    strides = [0 if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    batch = (*[0] * (problem.BATCH_DIMENSIONS - len(strides) + 2), *strides[:-2])
    return problem.Tensor(tensor.data_ptr(), tensor.shape[-1], batch, *strides[-2:])


def _chunks(heads: int, panels: int, threads: int) -> int:
    """Into how many pieces the rows of a head are cut, so that all threads have work."""
    if heads % threads == 0 or heads >= 2 * threads:
        return 1
    return min(panels, -(-2 * threads // heads))
