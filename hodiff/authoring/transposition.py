"""The transpose of a linear function, computed from its forward evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hodiff.errors import RouteError
from hodiff.torch_internals.autograd.grad_mode import run_backward, set_recording
from hodiff.torch_internals.autograd.transforms import in_transform
from hodiff.torch_internals.autograd.wrapped_tensors import below_transforms

Linear = Callable[[list[Tensor]], Sequence[Tensor | None]]


def transpose(linear: Linear, inputs: list[Tensor], cotangents: Sequence[Tensor | None]) -> list[Tensor | None]:
    r"""Compute $\bar t = L^T \bar y$ for a linear map $L$ of tensors shaped like the inputs; None is zero."""
    # Evaluate the map at zero and differentiate it backward. Both are recorded for higher derivatives if recording is
    # on.
    if in_transform():
        return _transpose_by_transform(linear, inputs, cotangents)
    recorded = torch.is_grad_enabled()
    set_recording(True)
    try:
        tangents = [torch.zeros_like(x).requires_grad_() for x in inputs]
        outputs, seeds = [], []
        for i, (output, cotangent) in enumerate(zip(linear(tangents), cotangents, strict=True)):
            if output is not None and cotangent is not None and _is_recorded(output, i, linear, inputs):
                outputs.append(output)
                seeds.append(cotangent)
        if not outputs:
            return [None] * len(inputs)
        # torch.autograd.grad would repeat checks, which cost a third of a small product.
        return list(
            run_backward(tuple(outputs), tuple(seeds), recorded, recorded, tuple(tangents), True, accumulate_grad=False)
        )
    finally:
        set_recording(recorded)


def _is_recorded(output: Tensor, i: int, linear: Linear, inputs: list[Tensor]) -> bool:
    """Whether a linear map recorded an output; raise if an unrecorded output is not zero."""
    if output.requires_grad or torch.compiler.is_compiling():
        return True
    at_ones = linear([torch.ones_like(x) for x in inputs])[i]
    if at_ones is not None and bool(below_transforms(at_ones).detach().any()):
        raise RouteError(
            "a rule of custom_jvp or custom_vjp computes outside of the graph (torch.no_grad, .detach(), .data, "
            "NumPy or a kernel), so that its transpose, the other mode's derivative, would silently be zero; write it "
            "with torch operators or other Functions."
        )
    return False


def _transpose_by_transform(
    linear: Linear, inputs: list[Tensor], cotangents: Sequence[Tensor | None]
) -> list[Tensor | None]:
    seeds: list[Tensor] = []

    def dense(*tangents: Tensor) -> tuple[Tensor, ...]:
        pairs = [
            (output, cotangent)
            for i, (output, cotangent) in enumerate(zip(linear(list(tangents)), cotangents, strict=True))
            if output is not None and cotangent is not None and _is_recorded(output, i, linear, inputs)
        ]
        # torch.func.vjp rejects a function without outputs.
        pairs = pairs or [(zeros[0].new_zeros(()), zeros[0].new_zeros(()))]
        seeds.extend(cotangent for _, cotangent in pairs)
        return tuple(output for output, _ in pairs)

    zeros = [torch.zeros_like(x) for x in inputs]
    _, pullback = torch.func.vjp(dense, *zeros)[:2]
    return list(pullback(tuple(seeds)))
