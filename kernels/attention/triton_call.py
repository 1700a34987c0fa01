"""Arguments of one call of Triton's attention, and the launches of its passes."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hodiff.errors import InputError
from hodiff.kernels.attention.options import Options
from hodiff.kernels.attention.triton_blocks import tiles
from hodiff.kernels.attention.triton_gradients import keys_pass, queries_pass
from hodiff.kernels.attention.triton_launch import launch, signature, store
from hodiff.kernels.attention.triton_output import output_pass, row_products
from hodiff.torch_internals.tensors import broadcast_shape

WIDEST = 256

_ACCUMULATORS = {
    torch.float16: tl.float32,
    torch.bfloat16: tl.float32,
    torch.float32: tl.float32,
}
# Triton 3.6 has no products of float64 for GPUs, 3.9 has.
if triton.knobs.runtime.interpret or tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9):
    _ACCUMULATORS[torch.float64] = tl.float64


_LAYOUTS: dict[Any, Layout] = {}


def takes(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the kernels support the dtypes and head sizes."""
    return q.dtype in _ACCUMULATORS and q.dtype == k.dtype == v.dtype and max(q.shape[-1], v.shape[-1]) <= WIDEST


class Call:
    """The tensors of one call, and what its passes share."""

    __slots__ = ("inputs", "key", "layout", "shared")

    def __init__(self, options: Options, q: Tensor, k: Tensor, v: Tensor, mask: Any, seed: Any):
        if mask is not None and mask.dtype == torch.bool:
            mask = mask.view(torch.uint8)
        self.inputs = (q, k, v)
        self.key = (options, q.device, *map(signature, (q, k, v, mask, seed)))
        layout = _LAYOUTS.get(self.key)
        if layout is None:
            layout = store(_LAYOUTS, self.key, Layout(options, q, k, v, mask, seed))
        self.layout = layout
        argument = layout.argument
        self.shared = (
            argument(q),
            argument(k),
            argument(v),
            None if mask is None else argument(mask, (layout.length, layout.keys)),
            argument(seed) if layout.drops else None,
        )

    def output(self) -> Tensor:
        """Allocate an output."""
        layout = self.layout
        return self.inputs[2].new_empty(*layout.batch, layout.length, layout.head)

    def row_numbers(self) -> Tensor:
        """Allocate one number per row."""
        return self.inputs[0].new_empty(*self.layout.batch, self.layout.length, dtype=self.layout.wide)

    def row_products(self, g: Tensor, out: Tensor, bar: Tensor) -> None:
        """Launch the sums of products of each row of g and out."""
        layout = self.layout
        arguments = (layout.argument(g), layout.argument(out), bar)
        self._launch("rows", row_products, (signature(g), signature(out)), arguments)

    def output_pass(self, **tensors: Any) -> None:
        """Launch one program per tile of queries."""
        moves = any(tensors.get(name) is not None for name in ("q_t", "k_t", "v_t"))
        self._pass("output tangent" if moves else "output", output_pass, tensors, ("out", "out_t"))

    def gradients(self, wanted: tuple[bool, ...], of_second_order: bool, **tensors: Any) -> tuple[Tensor, ...]:
        """Launch the passes that compute the wanted gradients."""
        room = [self.room_like(each) if want else None for each, want in zip(self.inputs, wanted, strict=True)]
        kind = " tangent" if of_second_order else ""
        if wanted[1] or wanted[2]:
            outputs = {"by_k": room[1], "by_v": room[2]}
            self._pass("keys" + kind, keys_pass, tensors | outputs, tuple(outputs))
        if wanted[0]:
            outputs = {"by_q": room[0]}
            self._pass("queries" + kind, queries_pass, tensors | outputs, tuple(outputs))
        pairs = zip(room, self.inputs, strict=True)
        return tuple([
            each if each.shape == like.shape else each.sum_to_size(like.shape).to(like.dtype)
            for each, like in pairs
            if each is not None
        ])

    def room_like(self, t: Tensor) -> Tensor:
        """Allocate a gradient, in wide numbers if it is summed over broadcast dimensions."""
        batch = self.layout.batch
        if t.shape[:-2] == batch:
            return torch.empty_like(t, memory_format=torch.contiguous_format)
        return t.new_empty(*batch, *t.shape[-2:], dtype=self.layout.wide)

    def _pass(self, kind: str, kernel: Any, tensors: Any, outputs: tuple[str, ...]) -> None:
        """Launch a pass; its arguments are in the order of the kernel's parameters."""
        argument = self.layout.argument
        given = [tensors.get(name) for name in ("g", "q_t", "k_t", "v_t", "g_t")]
        made = [tensors.get(name) for name in outputs]
        rows = [tensors.get(name) for name in ("top", "inverse", "bar", "mean", "bar_t")]
        # The layout of memory that this module allocates follows from the other arguments.
        key = (*map(signature, given), *[None if each is None else each.data_ptr() % 16 for each in (*made, *rows)])
        arguments = [*self.shared, *[None if each is None else argument(each) for each in (*given, *made)], *rows]
        self._launch(kind, kernel, key, arguments)

    def _launch(self, kind: str, kernel: Any, key: Any, arguments: Any) -> None:
        layout, device = self.layout, self.inputs[0].device
        if layout.count * (layout.keys if kernel is keys_pass else layout.length) == 0:
            return
        names = kernel.arg_names
        launch(
            kernel, (kind, self.key, key), device, arguments, lambda: layout.plan(kind, names[len(arguments) :], device)
        )


class Layout:
    """Sizes, strides and constants of a call, without its tensors: equal for all calls of one signature."""

    def __init__(self, options: Options, q: Tensor, k: Tensor, v: Tensor, mask: Any, seed: Any):
        _require(q, k, v)
        given = [each for each in (q, k, v, mask) if each is not None]
        self.batch = tuple(broadcast_shape(*[each.shape[:-2] for each in given]))
        self.count = math.prod(self.batch)
        self.length, self.keys = q.shape[-2], k.shape[-2]
        self.head, self.wide = v.shape[-1], torch.promote_types(q.dtype, torch.float32)
        # Dimensions of size 1 need no index, but a kernel's tuple may not be empty.
        several: list[int | None] = [dim for dim, size in enumerate(self.batch) if size > 1]
        self.dims = several[::-1] or [None]
        furthest = self.length + self.keys
        low, high = (
            None if each is None else max(-furthest, min(each, furthest)) for each in (options.low, options.high)
        )
        threshold = round(options.dropout_p * 2**32)
        self.dtype, self.drops = q.dtype, seed is not None and threshold > 0
        self.options = mask is not None or options.softcap is not None or self.drops
        # Whether tiles without hidden pairs are known beforehand.
        self.ordered = low is None and mask is None
        self.strides: dict[Any, Any] = {}
        self.constants: dict[str, Any] = {
            "sizes": tuple(1 if dim is None else self.batch[dim] for dim in self.dims),
            "numbering": self.numbering(options.batch),
            "length": self.length,
            "keys": self.keys,
            "low": low,
            "high": high,
            "SCALE": float(options.scale),
            "SOFTCAP": options.softcap,
            # Scores are computed in units of ln 2, as GPUs compute powers of 2. Masks are added without this factor, by
            # which the lowest number of float32 would become -inf.
            "UNIT": 1.0 if mask is not None and mask.is_floating_point() else math.log2(math.e),
            "THRESHOLD": threshold,
            "FACTOR": 1 / (1 - options.dropout_p) if threshold < 2**32 else 0.0,
            "E": q.shape[-1],
            "F": v.shape[-1],
            "PADDED_E": _padded(q.shape[-1]),
            "PADDED_F": _padded(v.shape[-1]),
            "ACC": _ACCUMULATORS[q.dtype],
        }

    def plan(self, kind: str, names: Any, device: torch.device) -> Any:
        """Return the named constants of a pass, the tiles to choose from, and the number of programs by tile."""
        tangent = kind.endswith("tangent")
        constants = self.constants | {
            "TANGENT": tangent,
            # Tiles without hidden pairs get a loop without comparisons. Passes of second order compute so much else for
            # a pair that they do not repay the time that another loop takes to compile.
            "SPLIT": self.ordered and not tangent and (kind != "keys" or self.constants["high"] is not None),
        }
        length, block = (self.keys, "keys") if kind.startswith("keys") else (self.length, "rows")
        head = max(constants["E"], constants["F"])
        return (
            {name: constants[name] for name in names if name in constants},
            tiles(kind, self.dtype, head, device, self.options),
            lambda tile: self.count * triton.cdiv(length, getattr(tile, block)),
        )

    def argument(self, t: Tensor, size: tuple[int, ...] | None = None) -> Any:
        """Return a tensor with its strides, after broadcasting the batch dimensions and, given a size, the last two."""
        size = size or t.shape[-2:]
        key = t.shape, t.stride(), size
        strides = self.strides.get(key)
        if strides is None:
            every = t.expand(*self.batch, *size).stride()
            strides = store(self.strides, key, (self.picked(every[:-2]), every[-2], every[-1]))
        return t, *strides

    def numbering(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return strides that number the weights for dropout: 0 along broadcast dimensions."""
        strides = [0 if size == 1 else math.prod(shape[dim + 1 :]) for dim, size in enumerate(shape)]
        return self.picked([0] * (len(self.batch) - len(strides)) + strides)

    def picked(self, strides: Any) -> tuple[int, ...]:
        """Select the strides of batch dimensions larger than 1, the last one first."""
        return tuple(0 if dim is None else strides[dim] for dim in self.dims)


def _padded(size: int) -> int:
    """Round a size up to a power of two, as tiles require, and to at least 16, as products require."""
    return max(16, triton.next_power_of_2(size))


def _require(q: Tensor, k: Tensor, v: Tensor) -> None:
    if not takes(q, k, v):
        got = ", ".join(f"{name} {tuple(t.shape)} {t.dtype}" for name, t in {"q": q, "k": k, "v": v}.items())
        dtypes = ", ".join(str(each).removeprefix("torch.") for each in _ACCUMULATORS)
        raise InputError(
            f"attention: q, k, v: Triton's kernels expect one dtype of {dtypes}, and "
            f"heads of at most {WIDEST} numbers, got {got}; hodiff.functions.attention takes others."
        )
