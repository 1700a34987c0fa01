"""Kernels of attention by device; they return None for tensors that they do not support."""

from __future__ import annotations

import warnings
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from hodiff.errors import HodiffWarning
from hodiff.functions.attention.dropout import head_keys
from hodiff.kernels.attention import cpu
from hodiff.kernels.attention.options import Options
from hodiff.kernels.fused_library import is_plain, nothing_watches

Given = dict[str, Any]
Found = tuple[Tensor, ...] | None


def on_cpu(kind: str, options: Options, wanted: tuple[bool, ...], with_output: bool, given: Given) -> Found:
    """Evaluate by C++, which sums in the tensors' own precision, and in float32 for 16 bits."""
    del kind
    inputs = {name: each for name, each in given.items() if each is not None and name != "seed"}
    if not cpu.takes(inputs):
        return None
    names = ("q", "k", "v", "mask")
    results = (*compress(names, wanted), *("out",) * with_output)
    seed, dtype = given["seed"], torch.promote_types(inputs["q"].dtype, torch.float32)
    for name, each in inputs.items():
        if each.dtype not in (dtype, torch.bool):
            inputs[name] = each.to(dtype)
    found = cpu.attention(
        inputs,
        results,
        options,
        None if seed is None else head_keys(seed, options.batch),
    )
    return tuple([
        each if name == "out" else each.sum_to_size(inputs[name].shape)
        for name, each in zip(results, found, strict=True)
    ])


def on_gpu(kind: str, options: Options, wanted: tuple[bool, ...], with_output: bool, given: Given) -> Found:
    """Evaluate by Triton if it is installed; gradients of a mask are not supported."""
    if wanted[3] or given.get("mask_t") is not None:
        return None
    q, k, v = given["q"], given["k"], given["v"]
    present = [each for each in given.values() if each is not None]
    if not nothing_watches() or not all(is_plain(each, q.device.type) for each in present):
        return None
    kernels = triton_kernels()
    if kernels is None or not kernels.takes(q, k, v):
        return None
    chosen: dict[str, tuple[Any, ...]] = {
        "value": (),
        "tangent": (),
        "gradient": (wanted[:3],),
        "gradient_tangent": (wanted[:3], with_output),
    }
    tensors = [each for name, each in given.items() if name != "mask_t"]
    try:
        found = getattr(kernels, kind)(options, *chosen[kind], *tensors)
    except torch.OutOfMemoryError:  # blocks of rows would not help
        raise
    except (RuntimeError, kernels.TritonError) as error:  # raised by a driver or a compiler
        _complain(f"{type(error).__name__}: {error}")
        return None
    return (found,) if isinstance(found, Tensor) else tuple(found)


@cache
def triton_kernels() -> Any:
    """Return the module of Triton's kernels, or None if Triton cannot be imported."""
    if find_spec("triton") is None:
        return None
    try:
        return import_module("hodiff.kernels.attention.triton_attention")
    except ImportError as error:
        _complain(f"it cannot be imported: {error}")
        return None


@cache
def _complain(reason: str) -> None:
    """Warn once why Triton's kernels are not used."""
    warnings.warn(
        f"attention: hodiff does not use Triton's kernels: {reason}. It runs torch's operators in blocks of rows, "
        "which is slower; another version of triton may help.",
        HodiffWarning,
        stacklevel=2,
    )
