"""Conjugate gradients and the Neumann series as functions of a product, against torch.linalg and closed sums."""

import pytest
import torch
from torch import Tensor

from hodiff.estimators.systems.conjugate_gradients import CURVATURE, PRECONDITIONER, conjugate_gradients
from hodiff.estimators.systems.neumann import neumann_series, safe_step_size


def positive(count: int, n: int = 6) -> Tensor:
    R = torch.randn(count, n, n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return R @ R.mT / n + torch.eye(n, dtype=torch.float64)


def random_columns(n: int, k: int) -> Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class Matrices:
    """One matrix per column, with a record of the columns that were multiplied."""

    def __init__(self, matrices: Tensor):
        self.matrices = matrices
        self.open: list[list[int]] = []

    def __call__(self, block: Tensor, columns: Tensor) -> Tensor:
        self.open.append(columns.tolist())
        return torch.einsum("kij,jk->ik", self.matrices[columns], block)


def test_columns_have_their_own_matrix_and_stop() -> None:
    matrices, b = positive(4), random_columns(6, 4)
    matrices[1] = 3 * torch.eye(6)  # converges in one step
    b[:, 2] = 0  # converges before the first step
    product = Matrices(matrices)
    found = conjugate_gradients(product, b, 1e-10 * b.norm(dim=0), 20)
    torch.testing.assert_close(found.solution, torch.linalg.solve(matrices, b.T[..., None])[..., 0].T)
    assert product.open[:2] == [[0, 1, 3], [0, 3]]
    assert len(product.open) == found.iterations <= 7
    assert not found.breakdowns
    assert bool((found.norms <= 1e-10 * b.norm(dim=0)).all())


def test_breakdown_ends_its_column_only() -> None:
    matrices, b = positive(3), random_columns(6, 3)
    matrices[1] = -torch.eye(6)
    found = conjugate_gradients(Matrices(matrices), b, 1e-10 * b.norm(dim=0), 20)
    assert found.breakdowns == {1: (CURVATURE, 1)}
    assert not found.solution[:, 1].any()
    torch.testing.assert_close(found.norms[1], b[:, 1].norm())
    for column in (0, 2):
        torch.testing.assert_close(found.solution[:, column], torch.linalg.solve(matrices[column], b[:, column]))
    indefinite = conjugate_gradients(Matrices(matrices), b, 0 * b.norm(dim=0), 20, precondition=torch.neg)
    assert indefinite.breakdowns == dict.fromkeys(range(3), (PRECONDITIONER, 1))


def test_non_finite_right_hand_side_is_a_breakdown() -> None:
    b = random_columns(6, 2)
    b[0, 1] = torch.nan
    found = conjugate_gradients(Matrices(positive(2)), b, 1e-10 * b.norm(dim=0), 20)
    assert 1 in found.breakdowns
    assert found.norms.isnan().tolist() == [False, True]


@pytest.mark.parametrize("most", [0, 2])
def test_norms_match_residuals_at_the_iteration_limit(most: int) -> None:
    matrices, b = positive(2), random_columns(6, 2)
    seen: list[int] = []
    found = conjugate_gradients(
        Matrices(matrices), b, 0 * b.norm(dim=0), most, watch=lambda iteration, _: seen.append(iteration)
    )
    residual = b - torch.einsum("kij,jk->ik", matrices, found.solution)
    torch.testing.assert_close(found.norms, residual.norm(dim=0))
    assert seen == list(range(1, most + 1))


def test_neumann_series_matches_closed_sum() -> None:
    A, b = positive(1)[0] / 4, random_columns(6, 2)
    found, diverged = neumann_series(lambda v: A @ v, b, torch.zeros(2), 0.5, 7)
    expected = 0.5 * sum(torch.linalg.matrix_power(torch.eye(6) - 0.5 * A, j) @ b for j in range(7))
    torch.testing.assert_close(found, expected)
    assert not diverged.any()
    solved, _ = neumann_series(lambda v: A @ v, b, 1e-12 * b.norm(dim=0), 0.5, 10_000)
    torch.testing.assert_close(solved, torch.linalg.solve(A, b))


@pytest.mark.parametrize(("growth", "most"), [(100.0, 20), (float("inf"), 10_000)])
def test_diverging_neumann_series_stops(growth: float, most: int) -> None:
    products = 0

    def product(v: Tensor) -> Tensor:
        nonlocal products
        products += 1
        return torch.stack([3 * v[0], 0.5 * v[1]])

    b = torch.eye(2, dtype=torch.float64)
    _, diverged = neumann_series(product, b, torch.zeros(2), 1.0, most, growth=growth)
    assert diverged.tolist() == [True, False]
    assert products < most


def test_safe_step_size_is_below_the_inverse_of_the_largest_eigenvalue() -> None:
    A = torch.diag(torch.tensor([5.0, 1.0, -0.5], dtype=torch.float64))
    step = safe_step_size(lambda v: A @ v, torch.ones(3, 1, dtype=torch.float64), 20)
    assert step == pytest.approx(0.9 / 5, rel=1e-6)
    assert safe_step_size(torch.zeros_like, torch.ones(3, 1), 20) == 1.0
