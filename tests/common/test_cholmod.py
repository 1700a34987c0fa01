"""CHOLMOD solutions through scikit-sparse, if installed, and through stand-ins for its 0.4 and 0.5 interfaces."""

import sys
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import scipy
import torch

from hodiff.common import cholmod
from hodiff.implicit.sparse_matrices import solve_by_factors
from hodiff.optimize.hessian_factors import SparseMatrix


class NotPositiveDefiniteError(Exception):
    pass


class NearlySingularWarning(Warning):
    pass


def dense_factor(matrix):
    try:
        return np.linalg.cholesky(matrix.toarray())
    except np.linalg.LinAlgError:
        raise NotPositiveDefiniteError from None


def solved(lower, b):
    return scipy.linalg.cho_solve((lower, True), b)


class Factor4:
    """Stand-in for the result of `cholesky` in scikit-sparse 0.4."""

    def __init__(self, lower):
        self._lower = lower

    def __call__(self, b):
        return solved(self._lower, b)

    def D(self):  # noqa: N802
        return self._lower.diagonal() ** 2


class Factor5:
    """Stand-in for the result of `cho_factor` in scikit-sparse 0.5."""

    def __init__(self, lower):
        self._lower = lower

    def solve(self, b):
        warnings.warn("Matrix is nearly singular", NearlySingularWarning, stacklevel=2)
        return solved(self._lower, b)

    def get_factor(self):
        return scipy.sparse.csc_array(self._lower.T)


INTERFACES = {
    "0.4": SimpleNamespace(
        CholmodNotPositiveDefiniteError=NotPositiveDefiniteError,
        CholmodWarning=NearlySingularWarning,
        cholesky=lambda A: Factor4(dense_factor(A)),
    ),
    "0.5": SimpleNamespace(
        CholmodNotPositiveDefiniteError=NotPositiveDefiniteError,
        CholmodWarning=NearlySingularWarning,
        cho_factor=lambda A: Factor5(dense_factor(A)),
    ),
}


@pytest.fixture(params=["installed", *INTERFACES])
def interface(request, monkeypatch):
    if request.param == "installed":
        return pytest.importorskip("sksparse.cholmod")
    monkeypatch.setattr(cholmod, "library", lambda: INTERFACES[request.param])
    return INTERFACES[request.param]


UNITS = np.logspace(-9, 9, 25)


def grid(side):
    """Five-point Laplacian plus 0.01 times the identity."""
    line = scipy.sparse.diags_array([-np.ones(side - 1), 2 * np.ones(side), -np.ones(side - 1)], offsets=[-1, 0, 1])
    return scipy.sparse.csc_array(scipy.sparse.kronsum(line, line) + 0.01 * scipy.sparse.eye_array(side**2))


def test_solutions_and_pivots_match_numpy(interface):
    matrix = grid(7)
    sides = np.random.default_rng(0).normal(size=(49, 3))
    for shift in (0.0, 0.5):
        whole = matrix.toarray() + shift * np.eye(49)
        factors = cholmod.cholesky(matrix, shift)
        np.testing.assert_allclose(factors.solve(sides), np.linalg.solve(whole, sides), rtol=1e-10)
        np.testing.assert_allclose(factors.solve(sides[:, 0]), np.linalg.solve(whole, sides[:, 0]), rtol=1e-10)
        assert np.log(factors.pivots).sum() == pytest.approx(np.linalg.slogdet(whole)[1])


def test_indefinite_matrix_has_no_factors(interface):
    lowest = np.linalg.eigvalsh(grid(4).toarray())[0]
    assert cholmod.cholesky(grid(4), -0.9 * lowest) is not None
    assert cholmod.cholesky(grid(4), -1.1 * lowest) is None
    assert cholmod.cholesky(scipy.sparse.csc_array((3, 3))) is None
    assert cholmod.cholesky(scipy.sparse.csc_array(np.ones((3, 3))), -1.0) is None


def test_newton_directions_match_superlu(interface, monkeypatch):
    matrix = scipy.sparse.csr_array(grid(5))
    slope = torch.linspace(-1, 1, 25, dtype=torch.float64)
    found = [SparseMatrix(matrix).solve(shift, slope) for shift in (0.0, 0.3, -3.0)]
    monkeypatch.setattr(cholmod, "library", lambda: None)
    expected = [SparseMatrix(matrix).solve(shift, slope) for shift in (0.0, 0.3, -3.0)]
    assert found[2] is expected[2] is None
    torch.testing.assert_close(found[:2], expected[:2])


@pytest.mark.parametrize(
    ("change", "has_factors"),
    [
        pytest.param(lambda a: a, [True], id="positive definite"),
        pytest.param(lambda a: a * np.outer(UNITS, UNITS), [True], id="in other units"),
        pytest.param(lambda a: a - 3 * np.eye(25), [False], id="indefinite"),
        pytest.param(np.triu, [], id="not symmetric"),
    ],
)
def test_linear_systems_match_numpy_with_and_without_factors(interface, monkeypatch, change, has_factors):
    matrix = scipy.sparse.csr_array(change(grid(5).toarray()))
    sides = torch.randn(3, 25, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    sides *= torch.from_numpy(matrix.diagonal()).abs().sqrt()
    made = []
    cholesky = cholmod.cholesky
    monkeypatch.setattr(cholmod, "cholesky", lambda *args: made.append(cholesky(*args)) or made[-1])
    found = solve_by_factors(matrix, sides)
    monkeypatch.setattr(cholmod, "library", lambda: None)
    expected = solve_by_factors(matrix, sides)
    assert found[1] == expected[1] == ""
    torch.testing.assert_close(found[0], expected[0], rtol=1e-9, atol=0)
    assert [each is not None for each in made] == has_factors


@pytest.mark.parametrize("entry", [np.nan, np.inf])
def test_singular_or_non_finite_matrix_is_reported(interface, entry):
    rhs = torch.ones(1, 25, dtype=torch.float64)
    broken = grid(5).toarray()
    broken[0, 1] = broken[1, 0] = entry
    assert solve_by_factors(scipy.sparse.csr_array(broken), rhs)[1] == "the Jacobian is not finite"
    _, trouble = solve_by_factors(scipy.sparse.csr_array(np.ones((3, 3))), rhs[:, :3])
    assert trouble.startswith("the Jacobian is singular")


def test_library_is_none_without_scikit_sparse(monkeypatch):
    monkeypatch.setitem(sys.modules, "sksparse.cholmod", None)
    cholmod.library.cache_clear()
    try:
        assert cholmod.library() is None
    finally:
        cholmod.library.cache_clear()
