"""Calls of operators along random polynomial curves in several directions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_unflatten

from hodiff.audit.samples import LABELS
from hodiff.checks.mutations.sample import Sample, is_buffer

_DIRECTIONS = 2


@dataclass(frozen=True)
class Curves:
    r"""Function and, for each direction, the curve $x_0 + \sum_k x_k t^k$ of each argument.

    Attributes:
        function: Takes the arguments, tensors or jets, and returns the outputs with real or complex numbers.
        start: The arguments at t = 0.
        terms: Coefficients of each argument from the first up, (K, directions, ...).
        seed: Seed of the function's random numbers.
    """

    function: Callable[..., tuple[Any, ...]]
    start: tuple[Tensor, ...]
    terms: tuple[Tensor, ...]
    seed: int = 0

    @property
    def order(self) -> int:
        """Number of coefficients of the curves, without the value."""
        return len(self.terms[0])

    @property
    def directions(self) -> int:
        """Number of directions."""
        return self.terms[0].shape[1]

    def along(self, direction: int, t: Any) -> tuple[Any, ...]:
        """Return the outputs at t, with equal random numbers at every t."""
        draw_from(self.seed)
        powers = [t]
        for _ in range(self.order - 1):
            powers.append(powers[-1] * t)
        row = torch.stack(powers)
        return self.function(
            *(
                x + torch.tensordot(row.to(x.dtype), own[:, direction], 1)
                for x, own in zip(self.start, self.terms, strict=True)
            )
        )


def places_of(sample: Sample, name: str) -> list[tuple[int, ...]]:
    """Return choices of moving leaves: all double-precision tensors, then the database's choice if it differs."""
    held = LABELS.get(name)
    everything = tuple(i for i, leaf in enumerate(sample.leaves) if i != held and _can_move(leaf))
    return [everything] if everything == sample.places else [everything, sample.places]


def curves_of(sample: Sample, places: Sequence[int], order: int, seed: int) -> Curves | None:
    """Return a sample of the database along random curves; None if no numbers move."""
    start = tuple(sample.leaves[i].detach().clone() for i in places)
    if not any(x.numel() for x in start):
        return None
    generator = torch.Generator().manual_seed(seed)
    terms = tuple(torch.randn((order, _DIRECTIONS, *x.shape), generator=generator, dtype=x.dtype) / 2 for x in start)
    return Curves(_function(sample, places), start, terms, seed)


def _can_move(leaf: Any) -> bool:
    return is_buffer(leaf) and leaf.dtype == torch.float64 and not leaf.is_nested


def _function(sample: Sample, places: Sequence[int]) -> Callable[..., tuple[Any, ...]]:
    def function(*moving: Any) -> tuple[Any, ...]:
        filled = [leaf.detach().clone() if is_buffer(leaf) else leaf for leaf in sample.leaves]
        for place, x in zip(places, moving, strict=True):
            filled[place] = x.clone()  # some operators write into their arguments
        outputs = tree_leaves(sample.call(*tree_unflatten(filled, sample.structure)))
        return tuple(each for each in outputs if hasattr(each, "is_complex") and moves(each))

    return function


def moves(x: Any) -> bool:
    """Whether an output has real or complex numbers."""
    return bool(x.is_floating_point() or x.is_complex())


def draw_from(seed: int) -> None:
    """Seed torch's default generator on the CPU, without touching other devices."""
    torch.default_generator.manual_seed(seed)
