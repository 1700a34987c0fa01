"""Loading and calling the compiled kernels of `fused.cpp`, and checks of the tensors that they support.

The kernels are compiled when hodiff is installed, if there is a C++ compiler. `takes` is False if they are missing, or
if tensors are not plain float32 on a CPU.
"""

from __future__ import annotations

import ctypes
import warnings
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hodiff.errors import HodiffWarning
from hodiff.kernels.fused_build import flaw
from hodiff.kernels.fused_signatures import SIGNATURES
from hodiff.torch_internals.autograd.batching import is_legacy_batched
from hodiff.torch_internals.autograd.grad_mode import in_forward_mode, in_jit_trace, tangents_are_on
from hodiff.torch_internals.autograd.wrapped_tensors import is_wrapped
from hodiff.torch_internals.interception import dispatch_mode_count
from hodiff.torch_internals.tensors import is_zero_without_memory

_FOLDER = Path(__file__).parent


def library() -> ctypes.CDLL | None:
    """Return the compiled kernels, or None if they were not built or torch brought another OpenMP."""
    found, complaint = _load()
    if complaint and complaint not in _said:
        # Record the complaint first, so that it is reported once even if warnings are errors.
        _said.add(complaint)
        warnings.warn(complaint, HodiffWarning, stacklevel=2)
    return found


_said: set[str] = set()


@cache
def _load() -> tuple[ctypes.CDLL | None, str]:
    """Load the library; return None and a complaint if it must not be used."""
    built = [_FOLDER / f"_fused{suffix}" for suffix in EXTENSION_SUFFIXES]
    path = next((each for each in built if each.exists()), None)
    if path is None:
        return None, ""
    if reason := flaw(path):
        return None, (
            f"hodiff.kernels: {path} is not used, for {reason}. hodiff computes the same by torch's operators, more "
            f"slowly. To build it again: `pip install --force-reinstall --no-deps hodiff`, or, in a checkout, "
            f"`pip install --editable .`."
        )
    try:
        found = ctypes.CDLL(str(path))
    except OSError:
        return None, ""
    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(found, name)
        function.restype, function.argtypes = result, arguments
    return found, ""


def available() -> bool:
    """Whether the kernels were built from these sources and can be loaded."""
    return library() is not None


def run(kernel: str, *arguments: int | float | None) -> Any:
    """Call a kernel by its name, with addresses and numbers as in its signature."""
    return getattr(_load()[0], kernel)(*arguments)


@cache
def formulas() -> dict[str, int]:
    """Functions that `elementwise` supports, as indices by name."""
    return _names("hodiff_formula", "hodiff_formulas")


@cache
def pullbacks() -> dict[str, int]:
    """Functions that `pullback` supports, as indices by name."""
    return _names("hodiff_pullback_formula", "hodiff_pullbacks")


def _names(name: str, count: str) -> dict[str, int]:
    found = library()
    if found is None:
        return {}
    name_of = getattr(found, name)
    return {name_of(i).decode(): i for i in range(getattr(found, count)())}


def suit(*tensors: Tensor) -> bool:
    """Whether kernels support these dtypes, shapes and devices; `takes` may still be False."""
    if torch.compiler.is_compiling() or not available():
        return False
    shape = tensors[0].shape
    return all(x.dtype is torch.float32 and x.device.type == "cpu" and x.shape == shape for x in tensors)


def takes(*tensors: Tensor, mask: Tensor | None = None, dtype: torch.dtype = torch.float32) -> bool:
    """Whether kernels can read these tensors and boolean mask: plain contiguous memory that nothing watches."""
    if not unwatched():
        return False
    for x in tensors:  # a generator would take half of the time
        if not (x.dtype is dtype and is_plain(x) and x.is_contiguous()):
            return False
    return mask is None or (mask.dtype is torch.bool and is_plain(mask) and mask.is_contiguous())


def unwatched() -> bool:
    """Whether there are kernels, and nothing has to see the operators that they replace."""
    return nothing_watches() and available()


def nothing_watches() -> bool:
    """Whether no compiler, mode, trace or forward pass has to see the operators that a kernel replaces."""
    if torch.compiler.is_compiling() or dispatch_mode_count() or in_jit_trace():
        return False
    return not (in_forward_mode() and tangents_are_on())


def is_plain(x: Tensor, device: str = "cpu") -> bool:
    """Whether a tensor has memory on the device that a kernel may read, and records no graph."""
    return (
        x.device.type == device
        and type(x) in (Tensor, torch.nn.Parameter)
        and x.layout is torch.strided
        and not (is_wrapped(x) or is_legacy_batched(x) or is_zero_without_memory(x) or x.is_neg())
        and not (x.requires_grad and torch.is_grad_enabled())
    )
