"""Attention on a CPU, in float32 and float64, by C++ kernels."""

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
# Rows of a panel, which is multiplied with all keys: more rows reuse operands more often, fewer fit a cache.
HEIGHT = 32
# Multiple to which rows are rounded, and bytes of a cache line, to which memory is aligned.
_STEP, _LINE = 16, 64
# Bands are compared as integers of a vector lane.
_FARTHEST = 2**30


def takes(inputs: Mapping[str, Tensor]) -> bool:
    """Whether the kernels support these tensors once they are converted to float32 or float64."""
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
    """Compute the wanted among "out" and the gradients of "q", "k", "v", "mask", or, given tangents, their tangents."""
    # Results have the joint batch, and the caller sums over broadcast dimensions. Only the gradient of the mask has the
    # mask's shape.
    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    batch = torch.broadcast_shapes(*(each.shape[:-2] for each in inputs.values()))
    heads, (length, keys) = math.prod(batch), (q.shape[-2], k.shape[-2])
    height = min(HEIGHT, -(-length // _STEP) * _STEP)
    threads = torch.get_num_threads()
    # Heads that share a matrix of the mask's gradient.
    grouped = inputs["mask"].shape[:-2] if "mask" in results else batch
    groups = math.prod(grouped)
    chunks = _chunks(groups, -(-length // height), threads)
    slices = _slices(groups * chunks, heads // groups, threads)
    call = problem.Problem(
        batch=_in_front(1, batch),
        grouped=_in_front(1, grouped),
        heads=heads,
        groups=groups,
        slices=slices,
        chunks=chunks,
        length=length,
        keys=keys,
        low=-_FARTHEST if options.low is None else max(options.low, -_FARTHEST),
        high=_FARTHEST if options.high is None else min(options.high, _FARTHEST),
        height=height,
        threads=min(threads, groups * chunks * slices),
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
        "k": (*batch, keys, k.shape[-1]),
        "v": (*batch, keys, v.shape[-1]),
    }
    found = {name: q.new_empty(shapes[name]) for name in results if name != "mask"}
    if chunks > 1:
        parts = {name: q.new_empty(chunks, slices, groups, *shapes[name][-2:]) for name in "kv" if name in found}
        for name, each in parts.items():
            setattr(call, f"parts_{name}", each.data_ptr())
    if "mask" in results:
        mask = inputs["mask"]
        call.mask_rows, call.mask_columns = mask.shape[-2:]
        found["mask"] = mask.new_zeros(slices, chunks if mask.shape[-2] == 1 else 1, *mask.shape)
    for name, each in found.items():
        setattr(call, problem.OUTPUTS[name], each.data_ptr())
    kernel, at = _KERNELS[q.dtype], ctypes.addressof(call)
    memory = q.new_empty(run(f"hodiff_attention_memory_{kernel}", at) * call.threads + _LINE)
    moving = any(name.endswith("_t") for name in inputs)
    run(f"hodiff_attention_{kernel}", at, -(-memory.data_ptr() // _LINE) * _LINE, moving, "g" in inputs)
    if "mask" in found:
        found["mask"] = found["mask"].flatten(0, 1).sum(0) if slices * chunks > 1 else found["mask"][0, 0]
    return tuple(found[name] for name in results)


def _in_front(value: int, sizes: Sequence[int]) -> tuple[int, ...]:
    return (*[value] * (problem.BATCH_DIMENSIONS - len(sizes)), *sizes)


def _described(tensor: Tensor) -> problem.Tensor:
    strides = [0 if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return problem.Tensor(tensor.data_ptr(), tensor.shape[-1], _in_front(0, strides[:-2]), *strides[-2:])


def _chunks(groups: int, panels: int, threads: int) -> int:
    """Number of pieces into which the rows of a group are cut, so that all threads have work."""
    if groups % threads == 0 or groups >= 2 * threads:
        return 1
    return min(panels, -(-2 * threads // groups))


def _slices(pieces: int, shared: int, threads: int) -> int:
    """Number of pieces into which the heads of a group are cut, each with its own gradient of the mask."""
    if pieces % threads == 0 or pieces >= 2 * threads:
        return 1
    return min(shared, -(-2 * threads // pieces))
