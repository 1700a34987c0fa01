"""Trace of an operator: by Hutchinson's estimator, Hutch++ or XTrace."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hodiff.common.options import require_choice, require_int
from hodiff.estimators.adapted_operators import view_of
from hodiff.estimators.dense_matrix import diagonal_of
from hodiff.estimators.probes import PROBES, draw, generator_or_default
from hodiff.estimators.results import Estimate, mean_and_error, precise
from hodiff.estimators.traces import hutchinson
from hodiff.estimators.traces.range_finder import find_range
from hodiff.estimators.view import View


def _xtrace(view: View, products: int, kind: str, generator: torch.Generator) -> tuple[float, float]:
    r"""Compute the mean over i of $\mathrm{tr}(Q_i^T A Q_i) + \omega_i^T (I - Q_i Q_i^T) A (I - Q_i Q_i^T) \omega_i$.

    $Q_i$ spans $A \omega_j$ for all j except i. All terms follow from $A \Omega = Q R$ and $A Q$, by
    $Q_i Q_i^T = Q (I - s_i s_i^T) Q^T$. The rest of a Gaussian test vector has a uniform direction in the complement of
    $Q_i$, so its length carries no information and is set to its mean.

    Args:
        view: Square operator.
        products: Number of products.
        kind: Distribution of the test vectors.
        generator: Source of random numbers.

    Returns:
        Trace and its standard error, which is too low if the i-th terms have common errors.

    Source: Epperly, Tropp, Webber, "XTrace: making the most of every sample in stochastic trace estimation",
    SIAM J. Matrix Anal. Appl. 45 (2024), sections 2.1 and 2.3, error estimate in section 2.4.
    """
    count = products // 2
    found = find_range(view, count, kind, generator)
    basis, omega = found.basis, found.probes
    image = precise(view.matmat(basis))
    inner = view.gram(basis, image)
    if found.complete:
        return inner.trace().item(), found.rounding * view.total**0.5

    s, r = found.left_out(), found.triangle
    w = view.gram(basis, omega)
    x = w - s * _dots(s, w)
    known = inner.trace() - _dots(s, inner @ s)
    rest = _dots(w, s) * _dots(s, r) - _dots(view.gram(image, omega), x) + _dots(x, inner @ x)
    if kind != "rademacher":
        left = view.dots(omega, omega) - x.square().sum(0)
        rest = rest * (view.total - count + 1) / left
    return mean_and_error(known + rest)


def _dots(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(0)


def _hutchplusplus(view: View, products: int, kind: str, generator: torch.Generator) -> tuple[float, float]:
    r"""Compute $\mathrm{tr}(Q^T A Q)$ plus the mean of $g^T (I - Q Q^T) A (I - Q Q^T) g$.

    The sketch, the first term and the mean take a third of the products each.

    Args:
        view: Square operator.
        products: Number of products.
        kind: Distribution of the test vectors.
        generator: Source of random numbers.

    Returns:
        Trace and its standard error, given Q.

    Source: Meyer, Musco, Musco, Woodruff, "Hutch++: optimal stochastic trace estimation", SOSA 2021, algorithm 1.
    """
    sketch = products // 3
    found = find_range(view, sketch, kind, generator)
    basis = found.basis
    known = view.dots(basis, precise(view.matmat(basis))).sum().item()
    if found.complete:
        return known, found.rounding * view.total**0.5
    rest = precise(draw(view, kind, products - 2 * sketch, generator))
    rest -= basis @ view.gram(basis, rest)
    image = precise(view.matmat(rest))
    unknown, error = mean_and_error(view.dots(rest, image))
    return known + unknown, error


# Algorithms, their default test vectors, and the fewest products for a standard error.
METHODS = {
    "hutchinson": (hutchinson.trace, "rademacher", 2),
    "hutch++": (_hutchplusplus, "rademacher", 4),
    "xtrace": (_xtrace, "sphere", 4),
}


def trace(
    A: Any,
    *,
    method: str = "hutch++",
    products: int = 100,
    probes: str | None = None,
    generator: torch.Generator | None = None,
    chunk_size: int | str | None = "auto",
    progress: bool = False,
) -> Estimate:
    r"""Trace of a square operator, from products with random vectors.

    $$ \mathrm{tr}\, A = \mathbb{E}\, z^T A z, \qquad \mathbb{E}\, z z^T = I $$

    "hutchinson" averages this expression, with an error that falls as $m^{-1/2}$ in the number m of products. "hutch++"
    computes the trace exactly on a range that a third of the products finds, and averages on the complement only: the
    error of a positive semi-definite operator falls as $1/m$. "xtrace" uses every vector for both, and is best if
    eigenvalues decay. "exact" multiplies with all n unit vectors; the other methods do so, too, if `products` is n or
    more.

    The terms that "xtrace" averages share vectors, so its standard error is too low: by a third to a half in our
    measurements. The true error is small nevertheless.

    Args:
        A: A square operator (n, n): a matrix of torch, NumPy or SciPy, a SciPy `LinearOperator`, or any object with
            `shape`, `dtype`, `device` and `A @ block` for blocks (n, k). It need not be symmetric.
        method: "hutchinson", "hutch++", "xtrace" or "exact".
        products: Number of products, 4 or more (2 for "hutchinson"), or n.
        probes: "rademacher" (signs), "gaussian" or "sphere" (Gaussian, of length $\sqrt n$); by default signs, and
            "sphere" for "xtrace".
        generator: Source of random numbers; by default a new generator with seed 0, so that results repeat.
        chunk_size: Vectors multiplied at a time: a positive int, None for all, or "auto" within a memory budget.
        progress: Whether to show a progress bar.

    Returns:
        An `Estimate`: `value`, `standard_error`, `products`, `method`.

    Raises:
        InputError: If A is no square real operator, an option is out of range, or a product is not finite.

    Example:
        >>> import torch
        >>> A = torch.diag(torch.logspace(0, -40, 200, dtype=torch.float64))
        >>> estimate = trace(A, method="xtrace", products=60)
        >>> bool(abs(estimate.value - A.trace()) < 4 * estimate.standard_error), estimate.standard_error < 1e-4
        (True, True)

    Source: M. F. Hutchinson, "A stochastic estimator of the trace of the influence matrix", Commun. Stat. 18 (1989);
    Meyer, Musco, Musco, Woodruff, "Hutch++", SOSA 2021; Epperly, Tropp, Webber, "XTrace", SIAM J. Matrix Anal. Appl. 45
    (2024).
    """
    view = view_of(A, "trace", chunk_size=chunk_size, sharded_too=True)
    require_choice("trace", "method", method, [*METHODS, "exact"])
    if probes is not None:
        require_choice("trace", "probes", probes, PROBES)
    generator = generator_or_default("trace", generator)
    if method != "exact":
        algorithm, kind, least = METHODS[method]
        require_int("trace", "products", products, min(least, view.total))
    if method == "exact" or products >= view.total:
        with view.counting(view.total, progress):
            diagonal = diagonal_of(view)
        return Estimate(
            view.dots(diagonal[:, None], torch.ones_like(diagonal)[:, None]).item(), 0.0, view.products, "exact"
        )
    with view.counting(products, progress):
        value, error = algorithm(view, products, probes or kind, generator)
    return Estimate(value, error, view.products, method)
