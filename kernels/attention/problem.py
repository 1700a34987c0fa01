"""Arguments of the C++ kernels for attention: structures with the same fields as in `tiles.cpp`."""

from __future__ import annotations

import ctypes

BATCH_DIMENSIONS = 8
_LONG, _DOUBLE, _POINTER = ctypes.c_long, ctypes.c_double, ctypes.c_void_p


class Tensor(ctypes.Structure):
    """Address and strides of a tensor (batch, rows, columns); a broadcast dimension has stride 0."""

    _fields_ = (
        ("data", _POINTER),
        ("columns", _LONG),
        ("strides", _LONG * BATCH_DIMENSIONS),
        ("row_stride", _LONG),
        ("column_stride", _LONG),
    )


# Names of the inputs; and the field of each result: the output, or the gradient with respect to an input.
INPUTS = ("q", "k", "v", "g", "q_t", "k_t", "v_t", "g_t", "mask", "mask_t")
OUTPUTS = {"out": "out", "q": "by_q", "k": "by_k", "v": "by_v", "mask": "by_mask"}
MASK_KINDS = {"none": 0, "boolean": 1, "additive": 2}


class Problem(ctypes.Structure):
    """All arguments of a kernel; the address of a missing tensor is null."""

    _fields_ = (
        ("batch", _LONG * BATCH_DIMENSIONS),
        ("grouped", _LONG * BATCH_DIMENSIONS),
        *((name, _LONG) for name in ("heads", "groups", "slices", "chunks", "length", "keys")),
        *((name, _LONG) for name in ("low", "high", "height", "threads")),
        ("scale", _DOUBLE),
        ("softcap", _DOUBLE),
        *((name, Tensor) for name in INPUTS),
        ("mask_kind", _LONG),
        ("head_keys", _POINTER),
        ("threshold", _LONG),
        ("kept", _DOUBLE),
        *((name, _POINTER) for name in ("out", "by_q", "by_k", "by_v", "parts_k", "parts_v", "by_mask")),
        ("mask_rows", _LONG),
        ("mask_columns", _LONG),
    )
