"""Iterations of `minimize`: progress, the user's callback, and results of runs that end early."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import scipy

from hodiff.errors import HodiffWarning
from hodiff.optimize.methods import METHODS
from hodiff.optimize.objective import Objective
from hodiff.optimize.recorded_point import Point

# Seconds after which a run without a progress bar warns about the cost of an iteration.
SLOW = 60.0
# Rejected steps in a row after which a trust region is smaller than rounding errors of x: each divides it by 4.
STUCK = 100


class StuckError(Exception):
    """Ends a run of SciPy's whose steps are all rejected."""


class Iterations:
    """Callback of all methods, which shows progress and calls the user's callback."""

    def __init__(self, objective: Objective, callback: Callable[..., Any] | None, bar: Any, method: str):
        self._objective, self._callback, self._bar, self._method = objective, callback, bar, method
        self.count = 0
        self._start = time.monotonic()
        self._silent = bar.disable
        self._last, self.unchanged = objective.variables.start, 0

    def __call__(self, x: np.ndarray, state: Any = None) -> None:
        """Record an iteration of one of SciPy's methods."""
        self.unchanged = self.unchanged + 1 if np.array_equal(x, self._last) else 0
        self._last = np.array(x)
        gradient = None if self._bar.disable else self._objective.gradient(x)
        self._tell(x, self._objective.value, gradient)
        takes = METHODS[self._method]
        if takes.trust_region and not takes.constraints and self.unchanged >= STUCK:
            raise StuckError

    def after(self, point: Point) -> None:
        """Record an iteration of one of hodiff's own methods."""
        gradient = None if self._bar.disable else self._objective.variables.array(point.slope)
        self._tell(point.x, lambda _: point.value, gradient)

    def _tell(self, x: Any, value: Callable[[Any], float], gradient: np.ndarray | None) -> None:
        self.count += 1
        seconds = time.monotonic() - self._start
        if self._silent and seconds > SLOW:
            self._silent = False
            counts = self._objective.counts
            curved = METHODS[self._method].curvature
            cheaper = "; 'l-bfgs-b' takes one gradient an iteration, and more iterations" if curved else ""
            warnings.warn(
                f"minimize: {self.count} iterations of {self._method!r} took {seconds:.0f} s: {counts.gradients} "
                f"gradients, {counts.products} products with the Hessian and {counts.hessians} Hessians, "
                f"{seconds / self.count:.2g} s an iteration{cheaper}. progress=True shows the progress, and "
                f"options={{'maxiter': ...}} limits the iterations.",
                HodiffWarning,
                stacklevel=2,
            )
        if gradient is not None:
            slope = np.linalg.norm(gradient)
            self._bar.set_postfix(value=f"{value(x):.6g}", gradient=f"{slope:.2g}", refresh=False)
            self._bar.update()
        if self._callback is not None:
            self._callback(scipy.optimize.OptimizeResult(x=self._objective.variables.tree(x), fun=value(x)))

    def ended(self, reason: str, status: int = 99) -> scipy.optimize.OptimizeResult:
        """Return the best point so far, for a run that did not finish."""
        value, x = self._objective.best or (math.nan, self._objective.variables.start)
        x = x if isinstance(x, np.ndarray) else self._objective.variables.array(x)
        return scipy.optimize.OptimizeResult(
            x=x,
            fun=value,
            nit=self.count,
            success=False,
            status=status,
            message=f"{reason}; x is the best point so far.",
        )


def finished(
    run: Callable[[], scipy.optimize.OptimizeResult], objective: Objective, iterations: Iterations
) -> scipy.optimize.OptimizeResult:
    """Run the method; return the best point if it is interrupted or fails on a value that is not finite."""
    try:
        with np.errstate(all="ignore"):
            return run()
    except KeyboardInterrupt:
        if objective.best is None:
            raise
        return iterations.ended("Interrupted")
    except StuckError:
        cause = (
            "a value or derivative is not finite near x"
            if objective.strayed
            else "because of rounding, or a wrong derivative of f"
        )
        return iterations.ended(f"No step changed x in {STUCK} iterations: {cause}", status=2)
    except StopIteration:
        # A callback may raise it, and some of SciPy's methods do not catch it.
        return iterations.ended("`callback` raised `StopIteration`")
    except (ValueError, np.linalg.LinAlgError):
        # SciPy's linear algebra rejects numbers that are not finite, and some methods do not check them first.
        if not objective.strayed:
            raise
        return iterations.ended("A value or derivative is not finite")
