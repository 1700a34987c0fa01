"""Result of a randomised differential operator."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from hodiff.common.trees import PyTree, unflatten
from hodiff.taylor.differential.random_directions import Sample


@dataclass(frozen=True)
class RandomisedEstimate:
    """Estimate of an operator from random directions, with its standard error.

    It is a pytree, so that functions under `torch.func` transforms may return it.

    Attributes:
        value: The estimate, in the structure of the operator's value. It can be differentiated.
        standard_error: Standard deviation of the value, estimated from the same samples, in the same structure, as a
            constant. It is 0 where every coordinate was taken, and NaN for a single sample.
    """

    value: PyTree
    standard_error: PyTree


pytree.register_dataclass(RandomisedEstimate)


def estimate(terms: Sequence[Any], structure: Any, sample: Sample) -> RandomisedEstimate:
    """Compute the estimate from the terms of each output, (samples, ...)."""
    scaled = [each if sample.scale == 1 else sample.scale * each for each in terms]
    values = [each.sum(0) / max(len(each), 1) for each in scaled]
    errors = [_standard_error(each.detach(), sample) for each in scaled]
    return RandomisedEstimate(unflatten(values, structure), unflatten(errors, structure))


def _standard_error(terms: Any, sample: Sample) -> Any:
    count = len(terms)
    if sample.spread == 0:
        return torch.zeros_like(terms[0]).abs()
    if count < 2:
        return torch.full_like(terms[0], math.nan).abs()
    return terms.std(0) * (sample.spread / math.sqrt(count))
