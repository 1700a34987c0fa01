"""The compiled kernels of `fused.cpp`: loading them, what they may read, and calling them.

They are compiled when hodiff is installed, if there is a C++ compiler. Where they are not, or tensors are not plain
float32 on a CPU, `takes` says so.
"""

from __future__ import annotations

import ctypes
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor, is_legacy_batchedtensor
from torch.autograd import forward_ad

_POINTER, _LONG, _FLOAT, _DOUBLE = ctypes.c_void_p, ctypes.c_long, ctypes.c_float, ctypes.c_double
_SIGNATURES = {
    "hodiff_elementwise": (_LONG, _POINTER, _POINTER, _POINTER, _LONG),
    "hodiff_pullback": (_LONG, *(_POINTER,) * 5, _LONG),
    "hodiff_gate_curvature": (*(_POINTER,) * 8, _LONG),
    "hodiff_logsumexp": (_POINTER, _POINTER, _LONG, _LONG),
    "hodiff_softmax": (_POINTER, _POINTER, _POINTER, _LONG, _LONG, _FLOAT),
    "hodiff_softmax_product": (*(_POINTER,) * 5, _LONG, _LONG, _FLOAT),
    "hodiff_weighted": (*(_POINTER,) * 3, _LONG, _LONG),
    "hodiff_weighted_pullback": (*(_POINTER,) * 5, _LONG, _LONG),
    "hodiff_softmax_curvature": (*(_POINTER,) * 7, _LONG, _LONG),
    "hodiff_normalization_curvature": (*(_POINTER,) * 9, _LONG, _LONG, _LONG, _DOUBLE, _LONG),
    "hodiff_add_relu": (*(_POINTER,) * 4, _LONG),
    "hodiff_masked": (*(_POINTER,) * 3, _LONG),
    "hodiff_average_float": (_POINTER, _LONG, _LONG, _POINTER),
    "hodiff_average_double": (_POINTER, _LONG, _LONG, _POINTER),
}


@cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None where they were not built or their OpenMP is not the one that torch brought."""
    for suffix in EXTENSION_SUFFIXES:
        path = Path(__file__).parent / f"_fused{suffix}"
        if path.exists():
            try:
                found = ctypes.CDLL(str(path))
                for name, arguments in _SIGNATURES.items():
                    getattr(found, name).argtypes, getattr(found, name).restype = arguments, None
            except (OSError, AttributeError):
                return None
            return found
    return None


def available() -> bool:
    """Whether the kernels were built."""
    return library() is not None


def run(kernel: str, *arguments: int | float | None) -> None:
    """Call a kernel.

    Args:
        kernel: Its name in the library.
        *arguments: Addresses and numbers, as its signature has them.
    """
    getattr(library(), kernel)(*arguments)


@cache
def formulas() -> dict[str, int]:
    """The functions that `elementwise` knows, by name."""
    return _names("hodiff_formula", "hodiff_formulas")


@cache
def pullbacks() -> dict[str, int]:
    """The functions that `pullback` knows, by name."""
    return _names("hodiff_pullback_formula", "hodiff_pullbacks")


def _names(name: str, count: str) -> dict[str, int]:
    found = library()
    if found is None:
        return {}
    name_of = getattr(found, name)
    name_of.restype = ctypes.c_char_p
    return {name_of(i).decode(): i for i in range(getattr(found, count)())}


def suit(*tensors: Tensor) -> bool:
    """Whether there are kernels for tensors of such dtypes and devices, which `takes` then may still refuse.

    Args:
        *tensors: What a kernel would read; a batch or a level of differentiation around them does not matter.

    Returns:
        Whether all are float32 on a CPU and of one shape, outside compiled code.
    """
    if torch.compiler.is_compiling() or not available():
        return False
    shape = tensors[0].shape
    return all(x.dtype is torch.float32 and x.device.type == "cpu" and x.shape == shape for x in tensors)


def takes(*tensors: Tensor, mask: Tensor | None = None) -> bool:
    """Whether the kernels may read these tensors, which then are plain memory that nothing watches.

    Args:
        *tensors: What a kernel would read.
        mask: A boolean tensor that it would read as well.

    Returns:
        False where a tensor is not contiguous float32 on a CPU, or is differentiated, batched, traced or intercepted by
        a dispatch mode, or where there are no kernels.

    Example:
        >>> takes(torch.ones(2, dtype=torch.float64))
        False
    """
    if torch.compiler.is_compiling() or not available():
        return False
    if torch._C._len_torch_dispatch_stack() or torch._C._get_tracing_state() is not None:
        return False
    if forward_ad._current_level >= 0 and torch._C._is_fwd_grad_enabled():
        return False
    return all(map(_is_plain, tensors)) and (mask is None or _is_plain(mask, torch.bool))


def _is_plain(x: Tensor, dtype: torch.dtype = torch.float32) -> bool:
    return (
        x.dtype is dtype
        and x.device.type == "cpu"
        and type(x) in (Tensor, torch.nn.Parameter)
        and x.layout is torch.strided
        and not (is_functorch_wrapped_tensor(x) or is_legacy_batchedtensor(x) or x._is_zerotensor() or x.is_neg())
        and x.is_contiguous()
        and not (x.requires_grad and torch.is_grad_enabled())
    )
