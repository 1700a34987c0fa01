"""Differences of a Function's forward, which are undefined at a kink."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hodiff.checks.attempts import Failure, attempt
from hodiff.checks.probes.function_calls import FunctionCall, as_tuple

# Relative gap of two steps' differences that suggests a kink between the steps; then smaller steps are tried.
_APART = 1e-5
_SMALLER = (1 / 16, 1 / 256)
# Slopes below this part of the value are rounding.
_NOISE = 1e-6


def differences(
    call: FunctionCall, output: int, argument: int, cotangent: Tensor, basis: Tensor | None
) -> Tensor | None:
    """Return differences of one contracted output along a basis; None if forward or its float64 twin cannot run."""
    value = call.args[argument]
    if (value.dtype != torch.float64 and call.truth is None) or not value.numel():
        return None
    steps = torch.eye(value.numel(), dtype=torch.float64, device="cpu") if basis is None else basis
    size = float(value.abs().max()) if bool(value.isfinite().all()) else 1.0
    largest = 1e-3 * (size if 0 < size < 1e-3 else max(1e-3, size))

    def at(move: Tensor) -> Tensor:
        y = _outputs(call, argument, move)[output]
        y = y.double() if y.is_floating_point() else y
        return (y * cotangent.conj()).real.sum() if y.is_complex() else (y * cotangent).sum()

    centre = attempt(at, torch.zeros_like(steps[0]))
    for h in (largest, *(largest * shrink for shrink in _SMALLER)):
        found = attempt(_central, at, centre, steps, h)
        if isinstance(found, Failure):
            return None
        result, settles = found
        if settles:
            return result if bool(result.isfinite().all()) else None
    return None


def _central(at: Callable[[Tensor], Tensor], centre: Tensor, steps: Tensor, h: float) -> tuple[Tensor, bool]:
    """Return differences extrapolated from two steps, and whether the steps agree; NaN at a kink."""
    (right, left), (near_right, near_left) = (
        (torch.stack([at(s * step) for step in steps]), torch.stack([at(-s * step) for step in steps]))
        for s in (h, h / 2)
    )
    gaps = ((right + left - 2 * centre) / h, (near_right + near_left - 2 * centre) / (h / 2))
    if any(_is_kink(float(a), float(b)) for a, b in zip(*gaps, strict=True)):
        return torch.full_like(right, float("nan")), True
    coarse, fine = (right - left) / (2 * h), (near_right - near_left) / h
    size = max(float(fine.abs().max()), _NOISE * float(centre.abs()))
    return ((4 * fine - coarse) / 3).double(), not float((fine - coarse).abs().max()) > _APART * size


def _outputs(call: FunctionCall, argument: int, move: Tensor) -> tuple[Any, ...]:
    moved = call.args[argument].double() + move.reshape(call.args[argument].shape)
    if call.truth is None:
        return call.fresh().at({argument: moved}).run().outputs
    wide = [a.double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in call.args]
    with torch.no_grad():
        return as_tuple(call.truth(*wide[:argument], moved, *wide[argument + 1 :]))


def _is_kink(coarse: float, fine: float) -> bool:
    """Whether the gap between one-sided slopes stays as the step is halved; for smooth functions, it is halved."""
    return abs(fine) > 0.8 * abs(coarse) and abs(fine) > 1e-6
