"""Comparison of two values of a derivative, and the status of the result."""

import math

import torch
from torch import Tensor

from hodiff.checks.attempts import Failure, Outcome
from hodiff.checks.oracles.finite_differences import DifferenceEstimate
from hodiff.checks.report.data import Entry

# A derivative is wrong if its error exceeds ten times the error estimate, which is only an estimate.
SAFETY = 10.0


def exact(value: Tensor) -> DifferenceEstimate:
    """Return a trusted value as an estimate without error."""
    return DifferenceEstimate(value.detach(), 0.0, 0.0, smooth=True)


def tolerance(order: int, eps: float) -> float:
    """Return the relative error allowed to a derivative: every order may lose half of the digits once."""
    return max(order, 1) * math.sqrt(eps)


def is_settled(estimate: DifferenceEstimate, lower: float, eps: float) -> bool:
    """Whether the error estimate is small enough to judge a derivative."""
    # A quarter of its digits suffice or, if it vanishes, half of the digits of the lower orders.
    size = float(estimate.value.abs().max())
    return estimate.smooth and estimate.error <= eps**0.25 * size + math.sqrt(eps) * lower


def scale_of(value: Tensor, lower: float, eps: float) -> float:
    """Return the size that errors are relative to."""
    # A vanishing derivative is measured at the rounding level of the lower orders: 1e-17 in the Hessian of a linear
    # function is no error.
    size = float(value.abs().max())
    return max(size if math.isfinite(size) else 0.0, math.sqrt(eps) * lower, torch.finfo(torch.float64).tiny)


def judge(
    route: str,
    order: int,
    quantity: str,
    outcome: Outcome,
    reference: DifferenceEstimate,
    *,
    lower: float,
    eps: float,
    wrong: str = "wrong",
) -> Entry:
    """Compare an outcome with a reference. NaN never agrees, and nothing agrees with an unsettled reference."""
    if isinstance(outcome, Failure):
        return Entry(route, order, quantity, None, None, "raises", outcome.message)
    value, scale = outcome.detach().to(reference.value), scale_of(reference.value, lower, eps)
    error = float((value - reference.value).abs().max()) / scale
    # Where a derivative vanishes, routes differ by the rounding of the lower orders.
    allowed = tolerance(order, eps) + SAFETY * (reference.error + eps * lower) / scale
    lost = int((~value.isfinite()).sum())
    doubt = f"error estimate {reference.error / scale:.1e}" if reference.smooth else "one-sided differences differ"
    verdicts = (
        (lost > 0, "non-finite", f"{lost} of {value.numel()} elements are not finite"),
        (not is_settled(reference, lower, eps), "non-smooth", f"differences do not settle ({doubt})"),
        (error <= allowed, "ok", ""),
        (not bool(value.any()), "zero", ""),
        (True, wrong, ""),
    )
    status, detail = next((status, detail) for holds, status, detail in verdicts if holds)
    return Entry(route, order, quantity, error, allowed, status, detail)
