r"""Attention and its derivatives to second order by Triton, in memory that is linear in both lengths.

With $P$ the weights, $\delta(t)$ the row sums of $P \circ t$ and $G$ the cotangent of $O$, two identities avoid
separate passes for row sums: $\delta(\bar P)$ is the row sum of $G \circ O$, with dropout as well, and its tangent is
the row sum of $\dot G \circ O + G \circ \dot O$. So a gradient takes the passes of `triton_output` and
`triton_gradients`, and so does its tangent. No pass adds to results of another pass, and results are the same in every
run.

Sums run in float32, or in float64 for float64. Computed numbers that are multiplied with tensors, such as weights, are
rounded to bfloat16 for bfloat16 tensors and to 11 bits for float16. `triton_tiles` multiplies float32 tensors, with
about twice the errors of plain float32.

Source: T. Dao, "FlashAttention-2", 2023, sections 3.1 and 3.2, for value and gradient; their tangents are derived in
docs/explanations/attention_second_order.md.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.errors import TritonError as TritonError

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


_LAYOUTS: dict[Any, _Layout] = {}


class Saved(NamedTuple):
    """Results of a value that save its gradient one pass.

    Attributes:
        out: The value.
        top: Greatest score of each row, zero if the row sees no key.
        inverse: 1 over the sum of exponentials of scores minus the greatest, zero if the row sees no key.
    """

    out: Tensor
    top: Tensor
    inverse: Tensor


def takes(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the kernels support the dtypes and head sizes."""
    return q.dtype in _ACCUMULATORS and q.dtype == k.dtype == v.dtype and max(q.shape[-1], v.shape[-1]) <= WIDEST


def value(options: Options, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, seed: Tensor | None) -> Tensor:
    r"""Compute $O = P V$.

    Args:
        options: Options of attention.
        q: Tensor (..., L, E), float16, bfloat16 or float32; with Triton 3.9 also float64.
        k: Tensor (..., S, E), of as many dimensions and the same dtype; batch dimensions broadcast.
        v: Tensor (..., S, F), of as many dimensions and the same dtype; batch dimensions broadcast.
        mask: Tensor that broadcasts with (..., L, S): boolean, True where a query sees a key, or floating-point, added
            to the scores; or None.
        seed: Integer tensor that broadcasts with (..., 1, 1), below 2**32, or None without dropout.

    Returns:
        Tensor (..., L, F).

    Raises:
        InputError: If `takes` is False for the tensors.
    """
    return value_to_save(options, q, k, v, mask, seed).out


def value_to_save(options: Options, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, seed: Tensor | None) -> Saved:
    """Compute `value`, and the row statistics that save `gradient` its first pass."""
    call = _Call(options, q, k, v, mask, seed)
    saved = Saved(call.output(), call.row_numbers(), call.row_numbers())
    call.output_pass(out=saved.out, top=saved.top, inverse=saved.inverse)
    return saved


def tangent(
    options: Options,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    seed: Tensor | None,
    q_t: Tensor | None,
    k_t: Tensor | None,
    v_t: Tensor | None,
) -> Tensor:
    r"""Compute $\dot O$ for tangents of q, k and v; None is zero."""
    call = _Call(options, q, k, v, mask, seed)
    out_t = call.output()
    if q_t is None and k_t is None and v_t is None:
        return out_t.zero_()
    call.output_pass(q_t=q_t, k_t=k_t, v_t=v_t, out_t=out_t)
    return out_t


def gradient(
    options: Options,
    wanted: tuple[bool, bool, bool],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    seed: Tensor | None,
    g: Tensor,
    saved: Saved | None = None,
) -> tuple[Tensor, ...]:
    r"""Compute the wanted $\bar Q, \bar K, \bar V$ of a cotangent g (..., L, F): 9 matrix products, 7 with `saved`."""
    if not any(wanted):
        return ()
    call = _Call(options, q, k, v, mask, seed)
    bar = call.row_numbers() if wanted[0] or wanted[1] else None
    if saved is None:
        rows = {"top": call.row_numbers(), "inverse": call.row_numbers(), "bar": bar}
        call.output_pass(g=g, **rows)
    else:
        if bar is not None:
            call.row_products(g, saved.out, bar)
        rows = {"top": saved.top, "inverse": saved.inverse, "bar": bar}
    return call.gradients(wanted, False, g=g, **rows)


def gradient_tangent(
    options: Options,
    wanted: tuple[bool, bool, bool],
    with_output: bool,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    seed: Tensor | None,
    g: Tensor,
    q_t: Tensor | None,
    k_t: Tensor | None,
    v_t: Tensor | None,
    g_t: Tensor | None,
) -> tuple[Tensor, ...]:
    """Tangents of `gradient` and, last, of the output if wanted: 24 matrix products, 3 less without `g_t`."""
    call = _Call(options, q, k, v, mask, seed)
    out_t: tuple[Tensor, ...] = (call.output(),) if with_output else ()
    if q_t is None and k_t is None and v_t is None and g_t is None:
        inputs = zip((q, k, v), wanted, strict=True)
        return *(torch.zeros_like(each) for each, want in inputs if want), *(each.zero_() for each in out_t)
    tangents = {"q_t": q_t, "k_t": k_t, "v_t": v_t}
    # Row numbers that no pass reads are not written.
    names = {
        "top": any(wanted),
        "inverse": any(wanted),
        "mean": any(wanted) and not (q_t is None and k_t is None),
        "bar": wanted[0] or wanted[1],
        "bar_t": wanted[0] or wanted[1],
    }
    rows = {name: call.row_numbers() for name, needed in names.items() if needed}
    call.output_pass(g=g, g_t=g_t, **tangents, **rows, out_t=out_t[0] if with_output else None)
    return *call.gradients(wanted, True, g=g, g_t=g_t, **tangents, **rows), *out_t


class _Call:
    """The tensors of one call, and what its passes share."""

    __slots__ = ("inputs", "key", "layout", "shared")

    def __init__(self, options: Options, q: Tensor, k: Tensor, v: Tensor, mask: Any, seed: Any):
        if mask is not None and mask.dtype == torch.bool:
            mask = mask.view(torch.uint8)
        self.inputs = (q, k, v)
        self.key = (options, q.device, *map(signature, (q, k, v, mask, seed)))
        layout = _LAYOUTS.get(self.key)
        if layout is None:
            layout = store(_LAYOUTS, self.key, _Layout(options, q, k, v, mask, seed))
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


class _Layout:
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
