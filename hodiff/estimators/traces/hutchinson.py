"""Means over random vectors: for the trace (Girard; Hutchinson), the diagonal (Bekas et al.) and the Frobenius norm."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from hodiff.common.chunks import spans
from hodiff.common.options import require_choice, require_int
from hodiff.estimators.adapted_operators import view_of
from hodiff.estimators.dense_matrix import columns
from hodiff.estimators.probes import PROBES, draw, generator_or_default
from hodiff.estimators.results import Estimate, mean_and_error, precise
from hodiff.estimators.view import View


def probed(view: View, count: int, kind: str, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    """Iterate over groups of test vectors with their products, `count` columns in all."""
    size = view.group_size(count, sum(view.shape) * view.dtype.itemsize)
    for start, stop in spans(count, size):
        probes = draw(view, kind, stop - start, generator)
        yield probes, view.matmat(probes)


def trace(view: View, count: int, kind: str, generator: torch.Generator) -> tuple[float, float]:
    r"""Compute the mean of $z^T A z$ and its standard error."""
    return _mean(view, count, kind, generator, view.dots)


def squared_norm(view: View, count: int, kind: str, generator: torch.Generator) -> tuple[float, float]:
    r"""Compute the mean of $\|A z\|^2$ and its standard error."""
    return _mean(view, count, kind, generator, lambda _, product: view.dots(product, product))


def _mean(
    view: View, count: int, kind: str, generator: torch.Generator, terms: Callable[[Tensor, Tensor], Tensor]
) -> tuple[float, float]:
    groups = [terms(precise(z), precise(product)) for z, product in probed(view, count, kind, generator)]
    return mean_and_error(torch.cat(groups))


def diagonal(view: View, count: int, kind: str, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    r"""Compute the ratio $\sum z \circ A z / \sum z \circ z$ of each entry, and its standard error to first order."""
    sums = torch.zeros(5, view.n, dtype=precise(torch.empty(0, device=view.device)).dtype, device=view.device)
    for z, product in probed(view, count, kind, generator):
        z, product = precise(z), precise(product)
        square, cross = z * z, z * product
        for total, term in zip(sums, (square, cross, square**2, cross * square, cross**2), strict=True):
            total += term.sum(1)
    weight, cross, square_square, cross_square, cross_cross = sums
    value = cross / weight
    spread = (cross_cross - 2 * value * cross_square + value**2 * square_square).clamp(min=0)
    return value, (spread * count / (count - 1)).sqrt() / weight


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
    view = view_of(A, "frobenius_norm", square=False, chunk_size=chunk_size, sharded_too=True)
    require_choice("frobenius_norm", "method", method, ["hutchinson", "exact"])
    require_choice("frobenius_norm", "probes", probes, PROBES)
    require_int("frobenius_norm", "products", products, min(2, view.total))
    generator = generator_or_default("frobenius_norm", generator)
    if method == "exact" or products >= view.total:
        with view.counting(view.total, progress):
            square = sum(view.dots(block, precise(block)).sum().item() for _, _, block in columns(view))
        return Estimate(square**0.5, 0.0, view.products, "exact")
    with view.counting(products, progress):
        square, error = squared_norm(view, products, probes, generator)
    value = square**0.5
    return Estimate(value, error / (2 * value) if value else 0.0, view.products, method)
