"""Rules for softmax and its logarithm where one probability rounds to 1 and torch's derivatives lose digits."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hodiff.corrections.mechanism.declining import UNNEEDED
from hodiff.corrections.mechanism.values import with_value
from hodiff.corrections.rules.elementwise.tails import LIMIT, loses_tails, range_of, seen
from hodiff.torch_internals.autograd.wrapped_tensors import below_transforms
from hodiff.torch_operators.table import forms_of

# Sum of the other probabilities below which 1 - p of the largest loses more than a few bits.
_REST = math.exp(-LIMIT)


class _Split(NamedTuple):
    """Place and value of the largest term, differences to it, and the sum of the exponentials of all other terms."""

    is_largest: Tensor
    largest: Tensor
    behind: Tensor
    others: Tensor


def rounds_to_one(x: Tensor, dim: Any) -> bool:
    """Whether one term of a sum of exponentials is nearly the whole sum, so that torch's derivatives lose digits."""
    plain = seen(x) if isinstance(dim, int) and x.dim() else None
    if plain is None:
        return False
    low, high = range_of(plain)
    if not math.isfinite(high) or high - low < LIMIT:
        return False
    # NaN, of sums without a finite term, counts.
    return not below_transforms(torch.log_softmax(x.detach(), dim)).max().item() < -_REST


def _split(x: Tensor, dim: Any) -> _Split | None:
    """Split a sum of exponentials in which one term is nearly the whole sum; None for other sums."""
    if not rounds_to_one(x, dim):
        return None
    place = x.detach().argmax(dim, keepdim=True)
    is_largest = torch.zeros_like(x.detach(), dtype=torch.bool).scatter(dim, place, True)
    largest = x.gather(dim, place)
    behind = x - largest
    others = torch.where(is_largest, 0, behind.exp()).sum(dim, keepdim=True)
    return _Split(is_largest, largest, behind, others)


def log_softmax(x: Tensor, dim: int) -> Tensor | None:
    """`torch.log_softmax` with derivatives that keep their digits; None where torch's derivatives keep them."""
    split = _split(x, dim)
    return None if split is None else with_value(_logarithms(split), torch.log_softmax(x.detach(), dim))


def _logarithms(split: _Split) -> Tensor:
    return torch.where(split.is_largest, 0, split.behind) - split.others.log1p()


@loses_tails(
    *(torch.log_softmax, Tensor.log_softmax, torch.special.log_softmax),
    name="torch.log_softmax",
    reference="$\\log(1 + s)$ of the sum s of all terms but the largest",
)
def _log_softmax(input: Tensor, dim: Any, dtype: torch.dtype | None = None) -> Any:
    found = log_softmax(input if dtype is None else input.to(dtype), dim)
    return UNNEEDED if found is None else found


@loses_tails(F.log_softmax, reference="torch.log_softmax")
def _functional_log_softmax(
    input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> Any:
    del _stacklevel
    return UNNEEDED if dim is None else _log_softmax(input, dim, dtype)


@loses_tails(
    *(torch.softmax, Tensor.softmax, torch.special.softmax),
    name="torch.softmax",
    reference="the exponential of torch.log_softmax",
)
def _softmax(input: Tensor, dim: Any, dtype: torch.dtype | None = None) -> Any:
    x = input if dtype is None else input.to(dtype)
    split = _split(x, dim)
    return UNNEEDED if split is None else with_value(_logarithms(split).exp(), torch.softmax(x.detach(), dim))


@loses_tails(F.softmax, reference="torch.softmax")
def _functional_softmax(
    input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> Any:
    del _stacklevel
    return UNNEEDED if dim is None else _softmax(input, dim, dtype)


@loses_tails(
    *forms_of("logsumexp"),
    reference="the largest and $\\log(1 + s)$ of the sum s of all other terms",
)
def _logsumexp(input: Tensor, dim: Any, keepdim: bool = False) -> Any:
    split = _split(input, dim)
    if split is None:
        return UNNEEDED
    found = split.largest + split.others.log1p()
    found = found if keepdim else found.squeeze(dim)
    return with_value(found, torch.logsumexp(input.detach(), dim, keepdim))
