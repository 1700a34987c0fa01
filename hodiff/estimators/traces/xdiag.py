"""XDiag: the diagonal on a sketched range exactly, the rest by averaging, with every test vector used for both."""

from __future__ import annotations

import torch
from torch import Tensor

from hodiff.estimators.dense_matrix import refuse_asymmetry
from hodiff.estimators.precision import precise
from hodiff.estimators.traces.range_finder import find_range
from hodiff.estimators.view import View


def diagonal(view: View, products: int, kind: str, generator: torch.Generator) -> tuple[Tensor, Tensor]:
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
        if (precise(image).T @ omega - found.triangle).norm() > view.rounding**0.5 * found.triangle.norm():
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
