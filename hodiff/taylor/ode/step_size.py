"""Order and step size of a Taylor series method, from the tolerance and the last coefficients.

Source: A. Jorba & M. Zou, "A software package for the numerical integration of ODEs by means of high-order Taylor
methods", Experimental Mathematics 14(1), 2005, section 3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hodiff.errors import InputError
from hodiff.taylor.jets import tensor_of
from hodiff.taylor.ode.field import Columns
from hodiff.torch_internals.autograd.wrapped_tensors import is_batched_by_any


@dataclass(frozen=True)
class Tolerance:
    """Allowed error of a step: the larger of an absolute tolerance and one relative to the state.

    Attributes:
        relative: Tolerance relative to the largest component of the state.
        absolute: Tolerance for any state.
        rounding: Machine epsilon of the state's dtype.
    """

    relative: float
    absolute: float
    rounding: float

    def at(self, size: float) -> float:
        """Allowed error for a state of a given size."""
        return max(self.absolute, self.relative * size)

    def order(self, size: float) -> int:
        r"""The order with the fewest operations per unit of time, $\lceil 1 - \frac12 \ln\varepsilon\rceil$."""
        relative = self.relative * size > self.absolute
        epsilon = max(self.relative if relative else self.absolute, self.rounding)
        return max(2, math.ceil(1 - math.log(min(epsilon, 1.0)) / 2))


def norm(leaves: Sequence[Any]) -> float:
    """Largest component of a state; infinite if a component is not finite."""
    largest = 0.0
    for each in leaves:
        tensor = tensor_of(each)
        if tensor is None or not tensor.numel():
            continue
        if is_batched_by_any(tensor):
            raise InputError(
                "odeint_taylor: y0, t or what f closes over: expected no torch.func.vmap around the call, because "
                "step sizes depend on the values, which vmap hides; make the batch a dimension of y0, so that all "
                "elements share steps."
            )
        found = float(tensor.detach().abs().amax())
        largest = max(largest, found if math.isfinite(found) else math.inf)
    return largest


def proposed(columns: Columns, tolerance: float) -> float:
    """Step size at which the last two terms are as large as the tolerance, reduced by a safety factor."""
    order = len(columns[0]) - 1
    steps = [math.inf]
    for j in range(max(order - 1, 1), order + 1):
        size = norm([column[j] for column in columns if column[j] is not None])
        if math.isinf(size):
            return 0.0
        if size > 0:
            steps.append((tolerance / size) ** (1 / j))
    return min(steps) * math.exp(-0.7 / max(order - 1, 1))


# Bounds on the factor by which a rejected step is shortened.
_LEAST, _MOST = 0.1, 0.9


def shortened(step: float, error: float, allowed: float, order: int) -> float:
    """Step size after a step whose error was too large; the error grows as step^(order + 1)."""
    if not math.isfinite(error):
        return _LEAST * step
    return step * min(_MOST, max(_LEAST, 0.9 * (allowed / error) ** (1 / (order + 1))))
