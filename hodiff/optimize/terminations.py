"""End states of hodiff's own minimisers, with SciPy's status numbers and messages where SciPy has them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import scipy
import torch
from torch import Tensor

from hodiff.optimize.recorded_point import Evaluation
from hodiff.optimize.variables import Variables


@dataclass(frozen=True)
class End:
    """Reason why a method ended: SciPy's status and a message."""

    status: int
    message: str


CONVERGED = End(0, "Optimization terminated successfully: the norm of the gradient is below gtol.")
ITERATIONS = End(1, "Maximum number of iterations has been exceeded.")
PRECISION = End(
    2, "No lower value was found, because of rounding or a wrong gradient of f. x is the best point so far."
)
NONFINITE = End(3, "The function or its gradient is not finite at x.")
INTERRUPTED = End(99, "Interrupted; x is the best point so far.")
STOPPED = End(99, "`callback` raised `StopIteration`.")


P = TypeVar("P", bound=Evaluation)


@dataclass
class Course(Generic[P]):
    """State of a running method, from which its result is built.

    Attributes:
        point: Current point.
        slope: Gradient at the point, a float64 vector.
        iterations: Number of completed iterations.
        decrease: Decrease of the value in the last iteration.
        remarks: Sentences that are appended to the message.
    """

    point: P
    slope: Tensor
    iterations: int = 0
    decrease: float = 0.0
    remarks: list[str] = field(default_factory=list)

    def result(self, end: End, **further: Any) -> scipy.optimize.OptimizeResult:
        """Build the result in the form of `scipy.optimize.minimize`."""
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


def finite(point: Evaluation, slope: Tensor) -> bool:
    """Return whether the value and the gradient are finite."""
    return point.finite and bool(torch.isfinite(slope).all())
