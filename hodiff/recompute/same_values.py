"""Comparison of the values of several evaluations of one function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hodiff.common.trees import tensors_in
from hodiff.errors import InputError
from hodiff.rules.autocast import autocast_dtype
from hodiff.torch_internals.autograd.transforms import outside_transforms
from hodiff.torch_internals.autograd.wrapped_tensors import below_transforms

# Number of rounding units of 16 bits by which values may differ: transforms run other kernels.
_ROUNDED = 4


def numbers_in(values: Any) -> list[Tensor]:
    """Unwrap the tensors in a pytree from all transforms, and detach them."""
    with outside_transforms():  # where a detached tensor is wrapped by none
        return [below_transforms(each).detach() for each in tensors_in(values)]


def require_same(
    caller: str, first: Sequence[Tensor], again: Sequence[Tensor], coarsest: Callable[[], float] | None = None
) -> None:
    """Raise if values differ from the first by more than rounding, of the dtype whose epsilon `coarsest` returns."""
    with outside_transforms():
        for one, other in zip(first, again, strict=False):
            # Tensors of other types need not have numbers.
            if type(other) is not Tensor or same(one, other) or (coarsest and same(one, other, coarsest())):
                continue
            raise _unsteady(caller, one, other)


def same(one: Tensor, other: Tensor, eps: float = 0.0) -> bool:
    """Whether two tensors are equal up to the rounding of sums in another order, and of a dtype with `eps`."""
    if one.shape != other.shape or not one.is_floating_point():
        return one.shape == other.shape
    # Sums of many threads may round differently from run to run.
    lowered = _ROUNDED * max(eps, _lowered_eps(one.device.type))
    tolerance = max(100 * torch.finfo(one.dtype).eps, lowered)
    return torch.allclose(one, other, rtol=tolerance, atol=tolerance, equal_nan=True)


def _lowered_eps(device: str) -> float:
    """Return the rounding unit of the dtype of `torch.autocast`, within which kernels and rules may differ."""
    dtype = autocast_dtype(device)
    return 0.0 if dtype is None else torch.finfo(dtype).eps


def difference(one: Tensor, other: Tensor) -> str:
    """Describe how two tensors of one shape differ."""
    if one.numel() == 1:
        return f"{one.item():.6g} and {other.item():.6g}, {abs(one.item() - other.item()):.1e} apart"
    return f"outputs that differ by up to {(one - other).abs().max().item():.2g}"


def _unsteady(caller: str, one: Tensor, other: Tensor) -> InputError:
    return InputError(
        f"{caller}: f: expected the same value each time, as it is evaluated anew for each group of directions or each "
        f"product, got {difference(one, other)}; look for random numbers (model.eval(), randomness='same', a seed that "
        "f sets itself) and for state that changes in between, or take the route 'reverse-over-reverse' (for a "
        "Jacobian, the mode 'reverse'), which evaluates f once."
    )
