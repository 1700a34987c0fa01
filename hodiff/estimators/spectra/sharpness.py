"""Sharpness of a loss: the largest eigenvalue of its Hessian, warm-started during training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hodiff.common.options import require_amount, require_bool, require_callable, require_choice, require_int
from hodiff.displays import badge, element, facts, number, page
from hodiff.estimators.adapted_operators import view_of
from hodiff.estimators.probes import draw, generator_or_default
from hodiff.estimators.results import cost_of, not_converged, precise
from hodiff.estimators.spectra.eigsh import start_block
from hodiff.estimators.spectra.lanczos import Chain
from hodiff.estimators.view import View

# Relative noise in a warm start, and steps beyond convergence, to find an eigenvector that has overtaken the start.
NOISE = 0.1
PATIENCE = 5


@dataclass(frozen=True, eq=False)
class Sharpness:
    r"""Largest eigenvalue, with the vector for the next warm start.

    Attributes:
        value: Eigenvalue.
        vector: Unit eigenvector, (n,), on the operator's device.
        residual: $\|A v - \lambda v\|$.
        converged: Whether the residual is within the tolerance.
        iterations: Number of products of the algorithm.
        products: Number of products, including that for the residual.
        method: "lanczos" or "power".
    """

    value: float
    vector: Tensor
    residual: float
    converged: bool
    iterations: int
    products: int
    method: str

    def _repr_html_(self) -> str:
        end = badge("converged", "ok") if self.converged else badge("not converged", "error")
        known = [("residual", number(self.residual, 2)), *cost_of(self)]
        return page(element("p", "largest eigenvalue ", element("b", number(self.value)), " ", end), facts(known))


def sharpness(
    A: Any,
    *,
    method: str = "lanczos",
    start: Tensor | None = None,
    tol: float = 1e-3,
    max_iterations: int = 100,
    throw: bool = True,
    callback: Callable[[int, float], None] | None = None,
    generator: torch.Generator | None = None,
    progress: bool = False,
) -> Sharpness:
    r"""Largest eigenvalue of a symmetric operator, warm-started from an earlier eigenvector.

    $$ \lambda_{\max}(A) = \max_{\|v\| = 1} v^T A v $$

    "lanczos" keeps all vectors (at most `max_iterations` of size n); "power" keeps two and needs many more products. A
    power iteration converges to the eigenvalue of largest absolute value. If that is negative, it restarts with a
    shifted operator, so that both methods find the same eigenvalue.

    Args:
        A: A symmetric operator (n, n), as for `trace`.
        method: "lanczos" or "power".
        start: Start, (n,): the `vector` of the last call. Some noise is added, and a few steps follow convergence, to
            find an eigenvector that has overtaken the start. A clear overtaking is found at once, others in the next
            calls, as the share of the new vector grows.
        tol: Allowed residual relative to the largest absolute eigenvalue so far. The eigenvalue's error is of second
            order in the residual.
        max_iterations: Maximum number of products of the algorithm.
        throw: Whether missing the tolerance raises an error instead of a warning.
        callback: Called as `callback(iteration, eigenvalue)` after each iteration.
        generator: Source of random numbers; by default a new generator with seed 0, so that results repeat.
        progress: Whether to show a progress bar.

    Returns:
        A `Sharpness`.

    Raises:
        InputError: If A is no symmetric real operator, `start` does not fit, or an option is out of range.
        ConvergenceError: If the tolerance is missed and `throw`; `result` is the `Sharpness` so far.

    Example:
        >>> import torch
        >>> A = torch.diag(torch.linspace(-2, 1, 100, dtype=torch.float64))
        >>> first = sharpness(A)
        >>> again = sharpness(1.01 * A, start=first.vector)
        >>> round(first.value, 4), round(again.value, 4), again.iterations < first.iterations
        (1.0, 1.01, True)

    Source: Cohen, Kaur, Li, Kolter, Talwalkar, "Gradient descent on neural networks typically occurs at the edge of
    stability", ICLR 2021; B. N. Parlett, "The symmetric eigenvalue problem", sections 4.2 and 13.
    """
    view = view_of(A, "sharpness", sharded_too=True)
    require_choice("sharpness", "method", method, METHODS)
    require_amount("sharpness", "tol", tol, positive=True)
    require_int("sharpness", "max_iterations", max_iterations, 1)
    require_bool("sharpness", "throw", throw)
    if callback is not None:
        require_callable("sharpness", callback=callback)
    generator = generator_or_default("sharpness", generator)
    vector = start_block(view, start, 1, generator)[:, 0]
    if start is not None:
        noise = draw(view, "sphere", 1, generator)[:, 0]
        vector = vector / _norm(view, vector) + NOISE * noise / view.total**0.5

    with view.counting(None, progress):
        value, vector, scale = METHODS[method](view, vector, tol, max_iterations, callback)
        iterations = view.products
        vector = vector / _norm(view, vector)
        image = precise(view.matmat(vector[:, None])[:, 0])
    residual = _norm(view, image - value * precise(vector))
    converged = residual <= max(2 * tol, 16 * view.rounding) * scale
    if not converged and view.finds_coarser():
        converged = residual <= 16 * view.rounding * scale
    result = Sharpness(value, vector, residual, converged, iterations, view.products, method)
    if not converged:
        not_converged(
            f"sharpness: {method} reached max_iterations={max_iterations} with residual {residual:.2g} of an "
            f"eigenvalue near {value:.4g}, tol={tol:g} allows {tol * scale:.2g}; raise max_iterations or tol."
            f"{view.precision}",
            result,
            throw=throw,
        )
    return result


Callback = Callable[[int, float], None] | None


def _lanczos(
    view: View, start: Tensor, tol: float, max_iterations: int, callback: Callback
) -> tuple[float, Tensor, float]:
    chain = Chain(view, start, max_iterations)
    settled = 0
    while True:
        chain.extend(view.matmat(chain.newest[:, None])[:, 0])
        values, vectors = chain.ritz()
        if callback is not None:
            callback(len(chain), float(values[-1]))
        scale = max(abs(values[0]), abs(values[-1]))
        settled = settled + 1 if chain.residuals(vectors[:, -1:])[0] <= tol * scale else 0
        if chain.full or chain.exhausted or settled > PATIENCE:
            break
    top = precise(chain.basis).T @ torch.from_numpy(vectors[:, -1]).to(precise(start))
    return float(values[-1]), top.to(view.dtype), scale


def _power(
    view: View, start: Tensor, tol: float, max_iterations: int, callback: Callback
) -> tuple[float, Tensor, float]:
    vector = start / _norm(view, start)
    shift, scale, value = 0.0, 0.0, 0.0
    for iteration in range(1, max_iterations + 1):
        image = view.matmat(vector[:, None])[:, 0]
        value = view.dots(vector[:, None], image[:, None]).item()
        scale = max(scale, abs(value))
        residual = _norm(view, precise(image) - value * precise(vector))
        if callback is not None:
            callback(iteration, value)
        if residual <= tol * scale:
            if value >= 0 or shift:
                break
            # The eigenvalues of A - value I are nonnegative, and its largest belongs to the largest of A.
            shift, vector = -value, start / _norm(view, start)
            continue
        vector = image + shift * vector
        vector = vector / _norm(view, vector)
    return value, vector, scale


def _norm(view: View, vector: Tensor) -> float:
    return view.norms(vector[:, None]).item()


METHODS = {"lanczos": _lanczos, "power": _power}
