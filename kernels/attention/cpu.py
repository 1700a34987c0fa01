"""Attention on a CPU, in float32 and float64, by C++ kernels."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hodiff.kernels.attention import problem
from hodiff.kernels.attention.options import Options
from hodiff.kernels.fused_library import is_plain, run, unwatched
from hodiff.torch_internals.tensors import broadcast_shape

_TANGENTS = {"q_t", "k_t", "v_t", "mask_t", "g_t"}
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
    fits = q.is_floating_point() and q.dim() - 2 <= problem.BATCH_DIMENSIONS
    return fits and all(map(is_plain, inputs.values()))


class _Prepared(NamedTuple):
    """Layout of a call, for all tensors of the same shapes and strides.

    Attributes:
        call: The call, without addresses of tensors.
        batch: The joint batch dimensions.
        memory: Elements of scratch memory of each thread.
        shapes: Shapes of the results.
        parts: Shapes of the partial gradients of keys and values, if the rows of a group are cut.
        pieces: Number of gradients of the mask to add up.
    """

    call: problem.Problem
    batch: tuple[int, ...]
    memory: int
    shapes: dict[str, tuple[int, ...]]
    parts: dict[str, tuple[int, ...]]
    pieces: int


def attention(
    inputs: Mapping[str, Tensor], results: tuple[str, ...], options: Options, head_keys: Tensor | None
) -> tuple[Tensor, ...]:
    """Compute the wanted among "out" and the gradients of "q", "k", "v", "mask", or, given tangents, their tangents."""
    # Results have the joint batch, and the caller sums over broadcast dimensions. Only the gradient of the mask has the
    # mask's shape.
    q = inputs["q"]
    layouts = tuple([(name, each.dtype, each.shape, each.stride()) for name, each in inputs.items()])
    prepared = _prepare(layouts, results, options, torch.get_num_threads())
    call = problem.Problem.from_buffer_copy(prepared.call)
    for name, each in inputs.items():
        getattr(call, name).data = each.data_ptr()
    if head_keys is not None:
        head_keys = head_keys.expand(*prepared.batch, 1, 1).contiguous()
        call.head_keys = head_keys.data_ptr()
    found = {name: (q.new_zeros if name == "mask" else q.new_empty)(shape) for name, shape in prepared.shapes.items()}
    for name, each in found.items():
        setattr(call, problem.OUTPUTS[name], each.data_ptr())
    parts = {name: q.new_empty(shape) for name, shape in prepared.parts.items()}
    for name, each in parts.items():
        setattr(call, f"parts_{name}", each.data_ptr())
    memory = q.new_empty(prepared.memory)
    at = -(-memory.data_ptr() // _LINE) * _LINE
    moving = not _TANGENTS.isdisjoint(inputs)
    run(f"hodiff_attention_{_KERNELS[q.dtype]}", ctypes.addressof(call), at, moving, "g" in inputs)
    if "mask" in found:
        found["mask"] = found["mask"].flatten(0, 1).sum(0) if prepared.pieces > 1 else found["mask"][0, 0]
    return tuple(map(found.__getitem__, results))


@lru_cache(maxsize=256)
def _prepare(layouts: Any, results: tuple[str, ...], options: Options, threads: int) -> _Prepared:
    """Lay out the work for tensors given by name, dtype, shape and stride."""
    shapes = {name: shape for name, _, shape, _ in layouts}
    q, k, v = shapes["q"], shapes["k"], shapes["v"]
    batch = tuple(broadcast_shape(*[shape[:-2] for shape in shapes.values()]))
    heads, (length, keys) = math.prod(batch), (q[-2], k[-2])
    height = min(HEIGHT, -(-length // _STEP) * _STEP)
    # Heads that share a matrix of the mask's gradient.
    grouped = shapes["mask"][:-2] if "mask" in results else batch
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
        threshold=min(round(options.dropout_p * 2**32), 2**32 - 1) if options.dropout_p else 0,
        kept=1 / (1 - options.dropout_p) if 0 < options.dropout_p < 1 else 0.0,
    )
    for name, dtype, shape, stride in layouts:
        steps = [0 if size == 1 else step for size, step in zip(shape, stride, strict=True)]
        setattr(call, name, problem.Tensor(None, shape[-1], _in_front(0, steps[:-2]), *steps[-2:]))
        if name == "mask":
            call.mask_kind = problem.MASK_KINDS["boolean" if dtype == torch.bool else "additive"]
    last = {"out": (length, v[-1]), "q": (length, q[-1]), "k": (keys, k[-1]), "v": (keys, v[-1])}
    made = {name: (*batch, *last[name]) for name in results if name != "mask"}
    parts: dict[str, tuple[int, ...]] = {}
    for name in "kv" if chunks > 1 else ():
        if name in made:
            parts[name] = (chunks, slices, groups, *last[name])
    if "mask" in results:
        mask = shapes["mask"]
        call.mask_rows, call.mask_columns = mask[-2:]
        made["mask"] = (slices, chunks if mask[-2] == 1 else 1, *mask)
    kernel = _KERNELS[layouts[0][1]]
    memory = run(f"hodiff_attention_memory_{kernel}", ctypes.addressof(call)) * call.threads + _LINE
    return _Prepared(call, batch, memory, made, parts, slices * chunks)


def _in_front(value: int, sizes: Sequence[int]) -> tuple[int, ...]:
    return (*[value] * (problem.BATCH_DIMENSIONS - len(sizes)), *sizes)


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
