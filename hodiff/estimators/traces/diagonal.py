"""Diagonal of an operator: by the estimator of Bekas, Kokiopoulou & Saad, or by XDiag."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hodiff.common.options import require_choice, require_int
from hodiff.estimators.adapted_operators import view_of
from hodiff.estimators.dense_matrix import diagonal_of, refuse_asymmetry
from hodiff.estimators.probes import PROBES, generator_or_default
from hodiff.estimators.results import DiagonalEstimate, precise
from hodiff.estimators.traces import hutchinson
from hodiff.estimators.traces.range_finder import find_range
from hodiff.estimators.view import View


def _xdiag(view: View, products: int, kind: str, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    r"""Compute the mean over i of $\mathrm{diag}(Q_i Q_i^T A) + \omega_i \circ (I - Q_i Q_i^T) A \omega_i$.

    The first term needs $A^T Q$. An operator without a transpose is assumed to be symmetric, and
    $(A Q)^T \Omega = Q^T A \Omega = R$ checks it.

    Args:
        view: Square operator.
        products: Number of products.
        kind: Distribution of the test vectors.
        generator: Source of random numbers.

    Returns:
        Diagonal (n,) and its standard errors (n,).

    Source: Epperly, Tropp, Webber, "XTrace: making the most of every sample in stochastic trace estimation",
    SIAM J. Matrix Anal. Appl. 45 (2024), section 2.5.
    """
    count = products // 2
    found = find_range(view, count, kind, generator)
    basis, omega = found.basis, found.probes
    image = view.rmatmat(basis)
    if image is None:
        image = view.matmat(basis)
        if (view.gram(precise(image), omega) - found.triangle).norm() > view.rounding**0.5 * found.triangle.norm():
            refuse_asymmetry(view)
    image = precise(image)
    known = (basis * image).sum(1)
    if found.complete:
        return known, torch.full_like(known, found.rounding)
    s = found.left_out()
    removed = basis @ s
    gamma = (s * found.triangle).sum(0)
    samples = known[:, None] - removed * (image @ s) + gamma * omega * removed
    return samples.mean(1), samples.std(1) / count**0.5


# Algorithms, and the fewest products for a standard error.
METHODS = {"hutchinson": (hutchinson.diagonal, 2), "xdiag": (_xdiag, 4)}


def diagonal(
    A: Any,
    *,
    method: str = "xdiag",
    products: int = 100,
    probes: str = "rademacher",
    generator: torch.Generator | None = None,
    chunk_size: int | str | None = "auto",
    progress: bool = False,
) -> DiagonalEstimate:
    r"""Diagonal of a square operator, from products with random vectors.

    $$ \mathrm{diag}(A) = \mathbb{E}\, z \circ A z, \qquad \mathbb{E}\, z z^T = I $$

    "hutchinson" averages this expression; its error in entry i comes from the other entries of row i, and falls as
    $m^{-1/2}$. "xdiag" treats the part in a random range exactly, and is far better if eigenvalues decay. "exact"
    multiplies with all n unit vectors; the other methods do so, too, if `products` is n or more.

    Args:
        A: A square operator (n, n), as for `trace`. "xdiag" multiplies with `A.T` if there is one; otherwise A must be
            symmetric, which is checked.
        method: "hutchinson", "xdiag" or "exact".
        products: Number of products, 4 or more (2 for "hutchinson"), or n.
        probes: "rademacher" (signs), "gaussian" or "sphere"; signs are nearly always best.
        generator: Source of random numbers; by default a new generator with seed 0, so that results repeat.
        chunk_size: Vectors multiplied at a time: a positive int, None for all, or "auto" within a memory budget.
        progress: Whether to show a progress bar.

    Returns:
        A `DiagonalEstimate`: `value` (n,), `standard_error` (n,), `products`, `method`.

    Raises:
        InputError: If A is no square real operator, an option is out of range, or a product is not finite.

    Example:
        >>> import torch
        >>> A = torch.tensor([[2.0, 1.0], [1.0, 3.0]])
        >>> diagonal(A).value
        tensor([2., 3.])

    Source: Bekas, Kokiopoulou, Saad, "An estimator for the diagonal of a matrix", Appl. Numer. Math. 57 (2007);
    Epperly, Tropp, Webber, "XTrace", SIAM J. Matrix Anal. Appl. 45 (2024), section 2.5.
    """
    view = view_of(A, "diagonal", chunk_size=chunk_size, sharded_too=True)
    require_choice("diagonal", "method", method, [*METHODS, "exact"])
    require_choice("diagonal", "probes", probes, PROBES)
    generator = generator_or_default("diagonal", generator)
    if method != "exact":
        algorithm, least = METHODS[method]
        require_int("diagonal", "products", products, min(least, view.total))
    if method == "exact" or products >= view.total:
        with view.counting(view.total, progress):
            exact = diagonal_of(view).to(view.dtype)
        return DiagonalEstimate(exact, torch.zeros_like(exact), view.products, "exact")
    with view.counting(products, progress):
        value, error = algorithm(view, products, probes, generator)
    return DiagonalEstimate(value.to(view.dtype), error.to(view.dtype), view.products, method)
