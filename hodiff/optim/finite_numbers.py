"""Checks that numbers are finite, and that their squares are in range if a step squares them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from hodiff.common.complex_numbers import as_real
from hodiff.common.trees import describe
from hodiff.errors import InputError
from hodiff.torch_internals import many_tensors as many

_REMEDY = "nothing has changed; call zero_grad() and leave this batch out, or multiply the loss by a number"


def require_finite(caller: str, what: str, tensors: Sequence[Tensor], squares_from: float | None = None) -> list[float]:
    """Return norms of tensors with elements; raise on NaN, infinity, and squares from `squares_from` out of range."""
    tensors = [each for each in tensors if each.numel() and (each.is_floating_point() or each.is_complex())]
    # One multi-tensor operator computes all norms. They decide, except where squares may leave the range of the dtype.
    norms = _floats(many.norm(tensors)) if tensors else []
    doubtful = [
        tensor
        for tensor, norm in zip(tensors, norms, strict=True)
        if not math.isfinite(norm)
        or (squares_from is not None and not _has_square(tensor.dtype, max(norm, squares_from), tensor.numel()))
    ]
    for tensor, largest in zip(doubtful, _largest(doubtful), strict=True):
        if not math.isfinite(largest):
            raise InputError(
                f"{caller}: step: expected finite {what}, got NaN or infinity in one of {describe(tensor)}; {_REMEDY}."
            )
        if squares_from is not None and largest > squares_from and not _has_square(tensor.dtype, largest):
            raise _out_of_range(caller, what, tensor, largest)
    return norms


def require_norms(caller: str, pairs: Sequence[tuple[Tensor, float]]) -> None:
    """Raise on gradients above `least` whose summed squares overflow or vanish."""
    norms = _floats(many.norm([gradient for gradient, _ in pairs])) if pairs else []
    require_finite(caller, "gradients", [g for (g, _), n in zip(pairs, norms, strict=True) if not math.isfinite(n)])
    for (gradient, least), norm in zip(pairs, norms, strict=True):
        if not _has_square(gradient.dtype, norm):
            # A norm of numbers whose squares are out of range is no use in the message.
            (largest,) = _largest([gradient])
            if largest > least:
                raise _out_of_range(caller, "gradients", gradient, largest)


def norm_of(vector: Tensor) -> float:
    """Compute the Euclidean norm in a wider dtype, as squares may be out of range."""
    wide = torch.float32 if vector.device.type == "mps" else torch.float64
    return float(torch.linalg.vector_norm(vector, dtype=wide))


def _has_square(dtype: torch.dtype, size: float, terms: int = 1) -> bool:
    """Whether the square of a number is in range, also divided by the number of terms."""
    smallest, largest = _range_of_squares(dtype)
    return smallest * terms <= size * size <= largest


@cache
def _range_of_squares(dtype: torch.dtype) -> tuple[float, float]:
    # Running averages begin with a small fraction of a square.
    return 2**20 * torch.finfo(dtype).tiny, torch.finfo(dtype).max


def _out_of_range(caller: str, what: str, tensor: Tensor, size: float) -> InputError:
    return InputError(
        f"{caller}: step: expected {what} whose squares are in the range of {tensor.dtype}, got {describe(tensor)} of "
        f"size {size:.0e}; {_REMEDY}."
    )


def _largest(tensors: Sequence[Tensor]) -> list[float]:
    """Return the largest magnitude in each tensor, or NaN if the tensor contains NaN."""
    # The infinity norm takes many times as long.
    found = _floats([torch.stack(torch.aminmax(as_real(t))).abs().amax() for t in tensors if t.numel()])
    following = iter(found)
    return [next(following) if t.numel() else 0.0 for t in tensors]


def _floats(numbers: Sequence[Tensor]) -> list[float]:
    """Convert numbers on any devices to floats, in one transfer."""
    if not numbers:
        return []
    first, listed = numbers[0], list(numbers)
    if any(each.dtype != first.dtype or each.device != first.device for each in listed):
        wide = torch.float32 if first.device.type == "mps" else torch.float64
        listed = [each.to(first.device, wide) for each in listed]
    floats: list[float] = torch.stack(listed).tolist()
    return floats
