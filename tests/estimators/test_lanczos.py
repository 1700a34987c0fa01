"""The Lanczos chain: orthonormal vectors, and the recurrence that defines them."""

import numpy as np
import pytest
import torch
from estimators.matrices import linspace_spectrum, symmetric

from hodiff.estimators.adapted_operators import view_of
from hodiff.estimators.spectra.lanczos import Chain, advance

N = 120
# A few steps resolve the first eigenvalues to the last digit; without restoring, orthogonality to them is lost.
SPIKES = symmetric(torch.cat([torch.tensor([1e3, 30.0, -1e2]), linspace_spectrum(N - 3, 0, 1)]))


@pytest.mark.parametrize("locked", [0, 2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_chain_is_orthonormal_and_satisfies_the_recurrence(dtype, locked):
    A = SPIKES.to(dtype)
    view = view_of(A, "test")
    found = torch.linalg.eigh(SPIKES).eigenvectors[:, -locked:] if locked else torch.empty(N, 0)
    found = found.to(dtype)
    chain = Chain(view, torch.ones(N, dtype=dtype), 40, locked=found)
    while advance(view, [chain]):
        continue
    assert len(chain) == view.products == 40
    vectors = torch.cat([chain.basis, found.T])
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(vectors @ vectors.T, torch.eye(len(vectors), dtype=dtype), rtol=0, atol=30 * eps)
    values, rows = chain.ritz()
    tridiagonal = torch.from_numpy((rows * values) @ rows.T).to(dtype)
    largest = np.abs(values).max()
    projected = chain.basis @ A @ chain.basis.T
    torch.testing.assert_close(projected, tridiagonal, rtol=0, atol=float(100 * eps * largest))
    ritz = chain.basis.T @ torch.from_numpy(rows).to(dtype)
    residuals = torch.linalg.vector_norm(A @ ritz - ritz * torch.from_numpy(values).to(dtype), dim=0)
    torch.testing.assert_close(
        residuals, torch.from_numpy(chain.residuals(rows)).to(dtype), rtol=0, atol=float(100 * eps * 1e3)
    )


def test_restart_continues_in_the_orthogonal_complement():
    view = view_of(torch.diag(torch.tensor([1.0, 2.0, 2.0, 2.0], dtype=torch.float64)), "test")
    chain = Chain(view, torch.tensor([1.0, 1.0, 0.0, 0.0], dtype=torch.float64), 4)
    while advance(view, [chain]):
        continue
    assert chain.exhausted
    assert chain.ritz()[0] == pytest.approx([1, 2])
    for _ in range(2):
        chain.restart(torch.randn(4, dtype=torch.float64))
        chain.extend(view.matmat(chain.newest[:, None])[:, 0])
    assert chain.full
    assert chain.ritz()[0] == pytest.approx([1, 2, 2, 2])
