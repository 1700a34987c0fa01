"""The formulas of attention, each with the kernel that evaluates it where it takes the tensors."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from hodiff.functions.attention import formulas
from hodiff.functions.attention.dropout import head_keys
from hodiff.functions.attention.options import Options
from hodiff.kernels.attention import cpu
from hodiff.rules.any_order import in_dtype
from hodiff.rules.blockwise import WithKernel

_INPUTS = ("q", "k", "v", "mask", "seed", "g", "q_t", "k_t", "v_t", "mask_t", "g_t")


def value(options: Options) -> WithKernel:
    """$O$."""
    return WithKernel(partial(formulas.value, options), partial(_run, options, ("out",), _INPUTS[:5]))


def tangent(options: Options) -> WithKernel:
    """Its tangent."""
    names = (*_INPUTS[:5], *_INPUTS[6:10])
    return WithKernel(partial(formulas.tangent, options), partial(_run, options, ("out",), names))


def gradient(options: Options, wanted: tuple[bool, ...]) -> WithKernel:
    """Those wanted of the gradients by q, k, v and the mask."""
    kernel = partial(_run, options, _chosen(wanted), _INPUTS[:6])
    return WithKernel(partial(formulas.gradient, options, wanted), kernel)


def gradient_tangent(options: Options, wanted: tuple[bool, ...], with_output: bool) -> WithKernel:
    """Their tangents and, last, that of the output if wanted."""
    results = (*_chosen(wanted), *(("out",) if with_output else ()))
    formula = partial(formulas.gradient_tangent, options, wanted, with_output)
    return WithKernel(formula, partial(_run, options, results, _INPUTS))


def _chosen(wanted: tuple[bool, ...]) -> tuple[str, ...]:
    return tuple(name for name, want in zip(("q", "k", "v", "mask"), wanted, strict=True) if want)


def _run(
    options: Options, results: tuple[str, ...], names: tuple[str, ...], *tensors: Tensor | None
) -> tuple[Tensor, ...] | None:
    """The kernel's results, each in the shape of what it belongs to; None where it does not take the tensors."""
    seed = tensors[names.index("seed")]
    inputs: dict[str, Any] = {
        name: each for name, each in zip(names, tensors, strict=True) if each is not None and name != "seed"
    }
    if "mask" in results or "mask_t" in inputs or not cpu.takes(inputs):
        return None
    dtype = torch.promote_types(inputs["q"].dtype, torch.float32)
    found = cpu.attention(
        {name: each if each.dtype == torch.bool else in_dtype(each, dtype) for name, each in inputs.items()},
        results,
        options,
        None if seed is None else head_keys(seed, options.batch),
    )
    return tuple(
        each if name == "out" else each.sum_to_size(inputs[name].shape)
        for name, each in zip(results, found, strict=True)
    )
