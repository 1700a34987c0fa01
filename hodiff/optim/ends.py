"""How hodiff's own minimisers end, in the numbers and words of SciPy where it has them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import scipy
import torch
from torch import Tensor

from hodiff.optim.point import Point
from hodiff.optim.variables import Variables


@dataclass(frozen=True)
class End:
    """Why a method ended: SciPy's status, and what it says."""

    status: int
    message: str


CONVERGED = End(0, "Optimization terminated successfully: the norm of the gradient is below gtol.")
ITERATIONS = End(1, "Maximum number of iterations has been exceeded.")
PRECISION = End(
    2, "No lower value was found: rounding, or a gradient that is not that of f. x is the best point so far."
)
NONFINITE = End(3, "The function or its gradient is not finite at x.")
STOPPED = End(99, "`callback` raised `StopIteration`.")


@dataclass
class Course:
    """Where a method is: its point, and what a result will tell of the way.

    Attributes:
        point: The present point.
        slope: Its gradient, a float64 vector.
        iterations: How many are done.
        decrease: By how much the last one lowered the value.
        remarks: What the message is to tell besides.
    """

    point: Point
    slope: Tensor
    iterations: int = 0
    decrease: float = 0.0
    remarks: list[str] = field(default_factory=list)

    def result(self, end: End, **further: Any) -> scipy.optimize.OptimizeResult:
        """What `scipy.optimize.minimize` would return."""
        return scipy.optimize.OptimizeResult(
            x=Variables.array(self.point.x),
            fun=self.point.value,
            jac=Variables.array(self.slope),
            nit=self.iterations,
            success=end.status == 0,
            status=end.status,
            message=" ".join([end.message, *self.remarks]),
            **further,
        )


def finite(point: Point, slope: Tensor) -> bool:
    """Whether value and gradient are numbers."""
    return point.finite and bool(torch.isfinite(slope).all())
