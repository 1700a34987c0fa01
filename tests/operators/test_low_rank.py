"""Diagonal plus low rank: products, inverse and determinant against dense matrices, and approximations."""

import copy
import math

import mpmath
import pytest
import torch
from operators.cases import close as close_tensors

import hodiff
from hodiff.errors import InputError
from hodiff.operators import LowRankPlusDiagonalOperator, MatrixOperator, low_rank_approximation

D = torch.float64


def close(found, expected):
    close_tensors(torch.as_tensor(found), torch.as_tensor(expected))


G = torch.Generator().manual_seed(2)
N, R = 9, 3
U, d = torch.randn(N, R, generator=G, dtype=D), torch.rand(N, generator=G, dtype=D) + 0.5
C = torch.tensor([[2.0, 0.5, 0.0], [0.5, 1.0, -0.3], [0.0, -0.3, 0.1]], dtype=D)
A = LowRankPlusDiagonalOperator(d, U, C)
DENSE = torch.diag(d) + U @ C @ U.T


def test_products_and_closed_forms_match_dense_matrix():
    close(A.to_dense(), DENSE)
    close(A.trace().value, DENSE.trace().item())
    close(A.diagonal().value, DENSE.diagonal())
    for damping in (0.0, 0.3):
        damped = DENSE + damping * torch.eye(N, dtype=D)
        close(A.inverse(damping=damping).to_dense(), torch.linalg.inv(damped))
        close(A.logdet(damping=damping).value, torch.logdet(damped).item())
        close(A.damped(damping).to_dense(), damped)
    close(A.inverse().inverse().to_dense(), DENSE)
    close(A.inverse().logdet().value, -torch.logdet(DENSE).item())
    assert {type(each) for each in (A.damped(1.0), A.inverse(), A.inverse().inverse())} == {LowRankPlusDiagonalOperator}


def test_negative_core_of_a_positive_definite_operator():
    S = torch.eye(N, dtype=D) - U @ U.T / (2 * torch.linalg.matrix_norm(U, 2) ** 2)
    B = LowRankPlusDiagonalOperator(torch.ones(N, dtype=D), U, torch.full((R,), -0.5, dtype=D) / U.norm() ** 2)
    assert B.logdet().value < 0
    scale = -0.5 / torch.linalg.matrix_norm(U, 2).item() ** 2
    B = LowRankPlusDiagonalOperator(torch.ones(N, dtype=D), U, torch.full((R,), scale, dtype=D))
    close(B.inverse().to_dense(), torch.linalg.inv(S))
    with pytest.raises(InputError, match=r"logdet: damping: expected a positive definite operator"):
        LowRankPlusDiagonalOperator(torch.ones(N, dtype=D), U, torch.full((R,), 4 * scale, dtype=D)).logdet()


def test_more_factors_than_rows():
    wide = torch.randn(4, 7, generator=G, dtype=D)
    B = LowRankPlusDiagonalOperator(torch.ones(4, dtype=D), wide, torch.ones(7, dtype=D))
    close(B.inverse().to_dense(), torch.linalg.inv(torch.eye(4, dtype=D) + wide @ wide.T))


@pytest.mark.parametrize("factors", ["of order one", "in the scale of the diagonal"])
@pytest.mark.parametrize("dtype", [D, torch.float32])
def test_inverse_is_accurate_for_diagonals_over_nine_decades(factors, dtype):
    """Errors are relative to the rows and columns of the inverse, for which float64 alone has too few digits."""
    entries = torch.logspace(0, -9, 8, dtype=D)[torch.tensor([3, 0, 7, 5, 1, 6, 2, 4])].to(dtype)
    columns = U[:8].to(dtype) * (entries.sqrt()[:, None] if "scale" in factors else 1)
    weights = (C + torch.eye(R, dtype=D)).to(dtype)
    B = LowRankPlusDiagonalOperator(entries, columns, weights)
    with mpmath.workdps(40):
        factor, core = mpmath.matrix(columns.double().tolist()), mpmath.matrix(weights.double().tolist())
        exact = (mpmath.diag(list(map(float, entries))) + factor * core * factor.T) ** -1
        expected = torch.tensor([[float(each) for each in row] for row in exact.tolist()], dtype=D)
    scale = entries.double().sqrt()
    found, expected = (scale[:, None] * each * scale for each in (B.inverse().to_dense().double(), expected))
    assert (found - expected).norm() < 10 * torch.finfo(dtype).eps * expected.norm()


def test_small_entries_beside_large_ones_keep_their_digits():
    """In float32 the diagonal of the approximation is a difference of much larger numbers."""
    diagonal = torch.logspace(0, -4, 40, dtype=D)
    matrix = torch.diag(diagonal) + 100 * torch.outer(diagonal, diagonal)
    B = low_rank_approximation(MatrixOperator(matrix.float(), symmetric=True), 3, diagonal=matrix.diagonal().float())
    kept = (B.factors.double() @ B.core.double() * B.factors.double()).sum(1)
    wanted = (matrix.diagonal().float().double() - kept).clamp(min=0)
    assert ((B.entries.double() - wanted).abs() <= torch.finfo(torch.float32).eps * wanted).all()


def test_float32_is_as_exact_as_its_numbers():
    B = A.to(dtype=torch.float32)
    found = B.inverse(damping=1e-3).to_dense()
    expected = torch.linalg.inv(DENSE + 1e-3 * torch.eye(N, dtype=D))
    assert found.dtype == torch.float32
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


def test_iterative_inverse_and_copies():
    v = torch.ones(N, dtype=D)
    close(A.inverse("cg", tol=1e-12) @ v, A.inverse() @ v)
    close(copy.deepcopy(A).to_dense(), DENSE)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: LowRankPlusDiagonalOperator(d, U[:4], C), r"factors: expected a floating-point tensor \(9, r\), got"),
        (lambda: LowRankPlusDiagonalOperator(d, U, C[:2]), r"core: expected a floating-point tensor \(3, 3\), got"),
        (lambda: LowRankPlusDiagonalOperator(d, U, C + torch.ones(3, 3).triu(1)), "core: expected a symmetric matrix"),
        (lambda: LowRankPlusDiagonalOperator(0 * d, U, C).inverse(), "damping: expected a diagonal above 0, got 0"),
        (lambda: LowRankPlusDiagonalOperator(0 * d, U, C).logdet(), "damping: expected a diagonal above 0, got 0"),
        (lambda: A.inverse(damping=-1.0), "inverse: damping: expected"),
        (lambda: A.inverse(tol=1e-3), "inverse: tol: expected only damping for method='exact'"),
        (lambda: low_rank_approximation(A, 10), "low_rank_approximation: rank: expected at most n = 9, got 10"),
        (lambda: low_rank_approximation(-1 * A, 3), "low_rank_approximation: A: expected a positive semi-definite"),
        (lambda: low_rank_approximation(MatrixOperator(U.T @ U), 2), "A: expected a symmetric operator"),
    ],
)
def test_rejects_bad_arguments(call, message):
    with pytest.raises(InputError, match=message):
        call()


# Approximations

NUMBERS = torch.logspace(2, -6, 60, dtype=D)
BASIS = torch.linalg.qr(torch.randn(60, 60, generator=G, dtype=D))[0]
MATRIX = (BASIS * NUMBERS) @ BASIS.T
DECAYING = MatrixOperator(MATRIX, symmetric=True)


def test_nystrom_error_is_within_its_bound():
    """The mean error in the nuclear norm is at most (1 + k / (rank - k - 1)) times the tail after k."""
    rank, k = 20, 9
    errors = []
    for seed in range(20):
        B = low_rank_approximation(DECAYING, rank, generator=torch.Generator().manual_seed(seed))
        left = torch.linalg.eigvalsh(MATRIX - B.to_dense())
        assert left.min() > -1e-9  # never exceeds A
        errors.append(left.sum().item())
    tail = NUMBERS[k:].sum().item()
    assert sum(errors) / len(errors) < (1 + k / (rank - k - 1)) * tail
    assert sum(errors) / len(errors) > 0.5 * NUMBERS[rank:].sum().item()


def test_diagonal_is_kept_and_helps():
    """A diagonal matrix plus four large directions: the diagonal replaces most of what low rank leaves out."""
    large = 3 * torch.randn(60, 4, generator=G, dtype=D)
    matrix = torch.diag(torch.rand(60, generator=G, dtype=D) + 0.5) + large @ large.T
    damped, v = matrix + 0.1 * torch.eye(60, dtype=D), torch.ones(60, dtype=D)
    B = MatrixOperator(matrix, symmetric=True)
    plain, both = low_rank_approximation(B, 20), low_rank_approximation(B, 20, diagonal=matrix.diagonal())
    close(both.diagonal().value, matrix.diagonal())
    assert plain.diagonal().value.sum() < matrix.trace()
    expected = torch.logdet(damped).item()
    determinants = [abs(each.logdet(damping=0.1).value - expected) for each in (plain, both)]
    assert determinants[1] < 0.3 * determinants[0]
    solution = torch.linalg.solve(damped, v)
    solutions = [(each.inverse(damping=0.1) @ v - solution).norm().item() for each in (plain, both)]
    assert solutions[1] < 0.3 * solutions[0]


def test_approximation_of_full_rank_is_exact():
    B = low_rank_approximation(A, N)
    close(B.to_dense(), DENSE)


def test_operator_on_parameters():
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1)).double()
    params = {name: each.detach() for name, each in model.named_parameters()}
    inputs, targets = torch.randn(20, 2, generator=G, dtype=D), torch.randn(20, 1, generator=G, dtype=D)
    H = hodiff.GaussNewtonOperator(model, torch.nn.functional.mse_loss, params, inputs, targets)
    B = low_rank_approximation(H, H.shape[0], diagonal=H.diagonal(exact=True).value)
    v = {name: torch.ones_like(each) for name, each in params.items()}
    found, expected = B @ v, H @ v
    assert found.keys() == params.keys()
    for name, each in found.items():
        close(each, expected[name])
    close(B.inverse(damping=0.1).to_dense(), torch.linalg.inv(H.damped(0.1).to_dense()))


def test_zero_operators_and_coarse_products():
    zero = low_rank_approximation(MatrixOperator(torch.zeros(5, 5, dtype=D), symmetric=True), 2)
    close(zero.to_dense(), torch.zeros(5, 5, dtype=D))
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3)).to(torch.bfloat16)
    inputs, targets = torch.randn(4, 3, generator=G), torch.randn(4, 3, generator=G)
    params = {name: each.detach() for name, each in model.named_parameters()}
    A = hodiff.GaussNewtonOperator(model, torch.nn.functional.mse_loss, params, inputs.bfloat16(), targets.bfloat16())
    found, exact = low_rank_approximation(A, 30).to_dense(), A.to_dense()
    assert (found - exact).norm() < 0.1 * exact.norm()


def test_rank_zero_is_the_diagonal():
    d = torch.tensor([1.0, 2.0, 4.0], dtype=D)
    A = LowRankPlusDiagonalOperator(d, torch.zeros(3, 0, dtype=D), torch.zeros(0, 0, dtype=D))
    close(A.inverse().to_dense(), (1 / d).diag())
    assert A.logdet().value == pytest.approx(math.log(8))
