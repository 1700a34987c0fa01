"""Condition number of a symmetric operator."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hodiff.common.options import require_amount, require_bool, require_choice, require_int
from hodiff.displays import element, facts, number, page
from hodiff.errors import InputError
from hodiff.estimators.adapted_operators import view_of
from hodiff.estimators.dense_matrix import symmetric_matrix_of
from hodiff.estimators.probes import draw, generator_or_default
from hodiff.estimators.results import cost_of, not_converged
from hodiff.estimators.spectra.lanczos import Chain
from hodiff.estimators.view import View

# Below this ratio the smallest eigenvalue may be zero up to rounding, which may exceed the dtype's.
SMALL = 1e-4


@dataclass(frozen=True)
class ConditionNumber:
    """Ratio of the extreme absolute eigenvalues.

    Attributes:
        value: Ratio; infinity for an operator that is singular up to rounding.
        largest: Eigenvalue of largest absolute value.
        smallest: Eigenvalue of smallest absolute value.
        products: Number of products.
        converged: Whether both eigenvalues meet the tolerance; if not, the value is a lower bound.
        method: "lanczos" or "dense".
    """

    value: float
    largest: float
    smallest: float
    products: int
    converged: bool
    method: str

    def _repr_html_(self) -> str:
        bound = "" if self.converged else "at least "
        known = [("largest", number(self.largest)), ("smallest", number(self.smallest)), *cost_of(self)]
        return page(element("p", "condition number ", element("b", bound + number(self.value))), facts(known))


def condition_number(
    A: Any,
    *,
    damping: float = 0.0,
    method: str = "lanczos",
    tol: float = 1e-3,
    max_iterations: int = 300,
    throw: bool = True,
    generator: torch.Generator | None = None,
    progress: bool = False,
) -> ConditionNumber:
    r"""Condition number of a symmetric operator, from its extreme eigenvalues.

    $$ \kappa(A + \lambda I) = \frac{\max_i |\lambda_i + \lambda|}{\min_i |\lambda_i + \lambda|} $$

    "lanczos" finds both ends of the spectrum by one chain of products, if all eigenvalues have one sign. The number of
    steps is proportional to $\sqrt \kappa$. "dense" multiplies with all n unit vectors, and so does "lanczos" if n is
    at most `max_iterations`.

    Args:
        A: A symmetric operator (n, n), as for `trace`.
        damping: The $\lambda$, 0 or more.
        method: "lanczos" or "dense".
        tol: Allowed residual of both eigenvalues, relative to each.
        max_iterations: Maximum number of products of "lanczos", which keeps as many vectors of size n.
        throw: Whether missing the tolerance raises an error instead of a warning.
        generator: Source of random numbers; by default a new generator with seed 0, so that results repeat.
        progress: Whether to show a progress bar.

    Returns:
        A `ConditionNumber`.

    Raises:
        InputError: If A is no symmetric real operator, an option is out of range, or "lanczos" finds eigenvalues of
            both signs.
        ConvergenceError: If the tolerance is missed and `throw`; `result` has a lower bound.

    Example:
        >>> import torch
        >>> condition_number(torch.diag(torch.tensor([-8.0, 1.0, 2.0]))).value
        8.0

    Source: Golub, Van Loan, "Matrix computations" (4th edition), section 2.6.2.
    """
    view = view_of(A, "condition_number", sharded_too=True)
    require_amount("condition_number", "damping", damping)
    require_choice("condition_number", "method", method, ["lanczos", "dense"])
    require_amount("condition_number", "tol", tol, positive=True)
    require_int("condition_number", "max_iterations", max_iterations, 1)
    require_bool("condition_number", "throw", throw)
    generator = generator_or_default("condition_number", generator)
    with view.counting(None, progress):
        if method == "dense" or view.total <= max_iterations:
            values = (torch.linalg.eigvalsh(symmetric_matrix_of(view)) + damping).tolist()
            return _ratio(view, values, True, "dense")
        start = draw(view, "gaussian", 1, generator)[:, 0]
        values, residuals, converged = _ends(view, start, damping, tol, max_iterations)
    result = _ratio(view, values, converged, method)
    if not converged:
        not_converged(
            f"condition_number: lanczos reached max_iterations={max_iterations}: eigenvalues near {values[0]:.4g} and "
            f"{values[1]:.4g} with residuals {residuals[0]:.2g} and {residuals[1]:.2g}, tol={tol:g}; it is "
            f'{result.value:.3g} or more. Raise max_iterations, tol or damping, or use method="dense".',
            result,
            throw=throw,
        )
    return result


def _ends(
    view: View, start: Tensor, damping: float, tol: float, max_iterations: int
) -> tuple[list[float], list[float], bool]:
    """Compute both ends of the spectrum and their residuals; raise as soon as their signs differ."""
    chain = Chain(view, start, max_iterations)
    while True:
        chain.extend(view.matmat(chain.newest[:, None])[:, 0])
        values, vectors = chain.ritz()
        ends, residuals = values[[0, -1]] + damping, chain.residuals(vectors[:, [0, -1]])
        # Eigenvalues lie beyond the outermost Ritz values, so different signs stay different.
        rounding = 16 * view.rounding * max(abs(ends))
        if ends[0] < -rounding and ends[1] > rounding:
            if view.finds_coarser():
                continue
            raise InputError(
                f"condition_number: A: expected eigenvalues of one sign, got some below {ends[0]:.6g} and above "
                f'{ends[1]:.6g} with damping={damping:g}; raise damping, or use method="dense".'
            )
        converged = bool((residuals <= (tol * abs(ends)).clip(min=rounding)).all())
        if converged or chain.full or chain.exhausted:
            return ends.tolist(), residuals.tolist(), converged


def _ratio(view: View, values: list[float], converged: bool, method: str) -> ConditionNumber:
    smallest, largest = min(values, key=abs), max(values, key=abs)
    if abs(smallest) <= SMALL * abs(largest):
        view.finds_coarser()
    singular = abs(smallest) <= 4 * view.rounding * abs(largest)
    value = math.inf if singular else abs(largest / smallest)
    return ConditionNumber(value, largest, smallest, view.products, converged, method)
