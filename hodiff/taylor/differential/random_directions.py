"""Random directions whose mean derivative is a differential operator: STDE.

Result of a randomised differential operator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hodiff.common.options import require_choice, require_generator, require_int
from hodiff.common.trees import PyTree, unflatten
from hodiff.errors import InputError
from hodiff.taylor.differential.operand import Directions, Operand
from hodiff.taylor.jets import tensor_of


@dataclass(frozen=True)
class Sampling:
    """Options for drawing random directions.

    Attributes:
        kind: Distribution of the directions.
        samples: Number of directions.
        generator: Random number generator; torch's default if None.
    """

    kind: str
    samples: int
    generator: torch.Generator | None

    def draw(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Draw independent numbers of mean 0 and variance 1, (samples, *shape)."""
        source = device if self.generator is None else self.generator.device
        return _INDEPENDENT[self.kind]((self.samples, *shape), self.generator, dtype, source).to(device)

    def pick(self, count: int, points: tuple[int, ...], device: torch.device) -> Tensor:
        """Draw distinct numbers below `count` at each point, (samples, *points); at most `count` of them."""
        source = device if self.generator is None else self.generator.device
        keys = torch.rand((*points, count), generator=self.generator, dtype=torch.float64, device=source)
        return keys.topk(min(self.samples, count)).indices.movedim(-1, 0).to(device)


def _signs(shape: Any, generator: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randint(0, 2, shape, generator=generator, dtype=dtype, device=device).mul_(2).sub_(1)


def _normal(shape: Any, generator: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=dtype, device=device)


_INDEPENDENT: dict[str, Callable[..., Tensor]] = {"rademacher": _signs, "gaussian": _normal}
KINDS = (*_INDEPENDENT, "coordinates")


def sampling_of(
    caller: str, randomised: Any, samples: Any, generator: Any, refused: dict[str, str] | None = None
) -> Sampling | None:
    """Validate the options of a randomised operator; None if the operator is exact."""
    require_choice(caller, "randomised", randomised, KINDS, optional=True)
    require_int(caller, "samples", samples, 1)
    require_generator(caller, "generator", generator)
    if randomised is None:
        if generator is not None:
            raise InputError(
                f"{caller}: generator: expected None without randomised, as nothing is drawn; randomised='rademacher', "
                "'gaussian' or 'coordinates' draws directions."
            )
        return None
    if refused and randomised in refused:
        raise InputError(f"{caller}: randomised: expected 'gaussian', got {randomised!r}: {refused[randomised]}")
    return Sampling(randomised, samples, generator)


@dataclass(frozen=True)
class Sample:
    """Random directions that were drawn.

    Attributes:
        directions: A tensor (samples, *leaf.shape) for each leaf; each point has its own directions.
        scale: Factor of a derivative along a direction.
        spread: Standard error of the mean relative to independent draws: below 1 without replacement.
    """

    directions: Directions
    scale: float
    spread: float


def sampled(operand: Operand, sampling: Sampling, weights: Directions | None = None) -> Sample:
    """Draw directions among the coordinates of an argument, or in the span of `weights`."""
    plain = [tensor_of(leaf) for leaf in operand.leaves]
    first = plain[0]
    count = operand.size if weights is None else len(weights[0])
    if sampling.kind == "coordinates" and not count:
        # Without coordinates none can be picked, and directions of any kind are the same.
        sampling = replace(sampling, kind="gaussian")
    if sampling.kind == "coordinates":
        index = sampling.pick(count, operand.points, first.device)
        taken = len(index)
        found = _units(operand, index) if weights is None else [_at(operand, each, index) for each in weights]
        return Sample(found, float(count), (1 - taken / max(count, 1)) ** 0.5)
    if weights is None:
        directions = [sampling.draw(tuple(leaf.shape), leaf.dtype, leaf.device) for leaf in plain]
    else:
        factors = sampling.draw((*operand.points, count), first.dtype, first.device)
        product = "snr,rn...->sn..." if operand.batched else "sr,r...->s..."
        directions = [torch.einsum(product, factors.to(each.dtype), each) for each in weights]
    return Sample(directions, 1.0, 1.0)


def _units(operand: Operand, index: Tensor) -> list[Tensor]:
    """Unit directions of the coordinates with given numbers."""
    found, start = [], 0
    for leaf, size in zip(operand.leaves, operand.sizes, strict=True):
        plain = tensor_of(leaf)
        places = torch.arange(start, start + size, device=index.device)
        rows = (places == index.unsqueeze(-1)).to(plain.device, plain.dtype)
        found.append(rows.reshape(len(index), *plain.shape))
        start += size
    return found


def _at(operand: Operand, weights: Any, index: Tensor) -> Any:
    """Select directions by their numbers, separately at each point."""
    return weights[index, torch.arange(operand.points[0], device=index.device)] if operand.batched else weights[index]


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
