"""Base class of optimizers for sums of squared residuals at points."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hodiff.common.trees import PyTree
from hodiff.errors import InputError
from hodiff.optim.solvers.sample_space import SampleSpaceOptimizer

# A function of one point, and the points.
Term = tuple[Callable[[Any], Tensor], PyTree]

# Of a line search over a grid: halvings of the shortest step, and misses in a row after which it ends.
_HALVINGS, _MISSES = 30, 5


class ResidualOptimizer(SampleSpaceOptimizer):
    """Optimizer whose loss is a sum over terms of half the mean square of a residual at points."""

    def counts(self, terms: Sequence[Term]) -> list[int]:
        """Raise on invalid terms; return their numbers of points."""
        for term in terms or (None,):
            if not (isinstance(term, tuple) and len(term) == 2):
                raise InputError(
                    f"{self.caller}: step: expected pairs (function, points), got {term!r}; pass step((equation, "
                    "inside), (boundary, edge))."
                )
        return [self._require_function(*term) for term in terms]

    def scaled(self, terms: Sequence[Term], counts: Sequence[int]) -> list[Tensor]:
        """Evaluate the residuals of all terms, over the roots of their numbers of points."""
        return [self._values(*term) / math.sqrt(count) for term, count in zip(terms, counts, strict=True)]

    def search(self, direction: Sequence[Tensor], value: Callable[[], Tensor], start: Tensor) -> float:
        """Take the step of least loss among halvings of the direction, or none; return its factor."""
        parameters = self.parameters()
        places, best, least, misses = [p.clone() for p in parameters], 0.0, start, 0

        def take(factor: float) -> None:
            for parameter, place in zip(parameters, places, strict=True):
                parameter.copy_(place)
            self.add([-factor * each for each in direction], parameters)

        try:
            for factor in (0.5**k for k in range(_HALVINGS + 1)):
                take(factor)
                if bool((found := value()) < least):
                    best, least, misses = factor, found, 0
                elif best:
                    misses += 1
                if misses == _MISSES:
                    break
        except BaseException:
            best = 0.0  # an error of the user's function, or an interruption, takes no step
            raise
        finally:
            take(best)
        return best


def half_square(values: Sequence[Tensor]) -> Tensor:
    """Return half the sum of all squares."""
    return torch.stack([each.square().sum() for each in values]).sum() / 2
