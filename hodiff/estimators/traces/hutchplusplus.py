"""Hutch++: the trace on a sketched range exactly, and on the complement by Hutchinson's estimator."""

from __future__ import annotations

import torch

from hodiff.estimators.precision import precise
from hodiff.estimators.probes import draw
from hodiff.estimators.results import mean_and_error
from hodiff.estimators.traces.range_finder import find_range
from hodiff.estimators.view import View


def trace(view: View, products: int, kind: str, generator: torch.Generator) -> tuple[float, float]:
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
    known = (basis * precise(view.matmat(basis))).sum().item()
    if found.complete:
        return known, found.rounding * view.n**0.5
    rest = precise(draw(view, kind, products - 2 * sketch, generator))
    rest -= basis @ (basis.T @ rest)
    image = precise(view.matmat(rest))
    unknown, error = mean_and_error((rest * image).sum(0))
    return known + unknown, error
