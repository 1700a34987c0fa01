"""Frobenius norm of an operator."""

from __future__ import annotations

from typing import Any

import torch

from hodiff.common.options import require_choice, require_int
from hodiff.estimators.dense_matrix import columns
from hodiff.estimators.precision import precise
from hodiff.estimators.probes import PROBES, generator_or_default
from hodiff.estimators.results import Estimate
from hodiff.estimators.traces import hutchinson
from hodiff.estimators.view import view_of


def frobenius_norm(
    A: Any,
    *,
    method: str = "hutchinson",
    products: int = 100,
    probes: str = "rademacher",
    generator: torch.Generator | None = None,
    chunk_size: int | str | None = "auto",
    progress: bool = False,
) -> Estimate:
    r"""Frobenius norm of an operator, from products with random vectors.

    $$ \|A\|_F^2 = \mathrm{tr}\, A^T A = \mathbb{E}\, \|A z\|^2, \qquad \mathbb{E}\, z z^T = I $$

    Args:
        A: An operator (m, n), as for `trace`; it need not be square.
        method: "hutchinson", or "exact" for products with all n unit vectors, which are also computed if `products` is
            n or more.
        products: Number of products, 2 or more.
        probes: "rademacher" (signs), "gaussian" or "sphere".
        generator: Source of random numbers; by default a new generator with seed 0, so that results repeat.
        chunk_size: Vectors multiplied at a time: a positive int, None for all, or "auto" within a memory budget.
        progress: Whether to show a progress bar.

    Returns:
        An `Estimate`; the standard error is propagated from the mean of squares, to first order.

    Raises:
        InputError: If A is no real operator, an option is out of range, or a product is not finite.

    Example:
        >>> import torch
        >>> frobenius_norm(torch.tensor([[3.0, 0.0, 0.0], [0.0, 4.0, 0.0]])).value
        5.0

    Source: M. F. Hutchinson, "A stochastic estimator of the trace of the influence matrix", Commun. Stat. 18 (1989).
    """
    view = view_of(A, "frobenius_norm", square=False, chunk_size=chunk_size)
    require_choice("frobenius_norm", "method", method, ["hutchinson", "exact"])
    require_choice("frobenius_norm", "probes", probes, PROBES)
    require_int("frobenius_norm", "products", products, min(2, view.n))
    if method == "exact" or products >= view.n:
        with view.counting(view.n, progress):
            square = sum(precise(block).square().sum().item() for _, _, block in columns(view))
        return Estimate(square**0.5, 0.0, view.products, "exact")
    with view.counting(products, progress):
        square, error = hutchinson.squared_norm(view, products, probes, generator_or_default(generator))
    value = square**0.5
    return Estimate(value, error / (2 * value) if value else 0.0, view.products, method)
