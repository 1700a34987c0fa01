"""XTrace: Hutch++ with every test vector used for both steps, by leaving out one vector at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from hodiff.estimators.precision import precise
from hodiff.estimators.results import mean_and_error
from hodiff.estimators.traces.range_finder import find_range
from hodiff.estimators.view import View


def trace(view: View, products: int, kind: str, generator: torch.Generator) -> tuple[float, float]:
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
    inner = basis.T @ image
    if found.complete:
        return inner.trace().item(), found.rounding * view.n**0.5

    s, r = found.left_out(), found.triangle
    w = basis.T @ omega
    x = w - s * _dots(s, w)
    known = inner.trace() - _dots(s, inner @ s)
    rest = _dots(w, s) * _dots(s, r) - _dots(image.T @ omega, x) + _dots(x, inner @ x)
    if kind != "rademacher":
        left = omega.square().sum(0) - x.square().sum(0)
        rest = rest * (view.n - count + 1) / left
    return mean_and_error(known + rest)


def _dots(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(0)
