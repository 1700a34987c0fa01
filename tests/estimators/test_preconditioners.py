"""Preconditioners: their products, against eigenvectors, and the number of iterations that they save."""

import math

import pytest
import torch
from estimators.matrices import Wrapped, linspace_spectrum, symmetric

from hodiff import InputError
from hodiff.estimators import ConvergenceError, jacobi_preconditioner, nystrom_preconditioner, solve

N = 100
POSITIVE = symmetric(torch.logspace(0, -2, N, dtype=torch.float64))
B = torch.randn(N, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
ILL = torch.logspace(3, -3, 300, dtype=torch.float64)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("method", ["cg", "minres", "gmres"])
def test_preconditioners_save_iterations_and_keep_the_solution(method):
    A = torch.diag(ILL) + 1e-3 * symmetric(linspace_spectrum(300))
    b = torch.ones(300, dtype=torch.float64)
    options = {"method": method, "damping": 1e-2, "tol": 1e-8, "max_iterations": 20_000}
    plain = solve(A, b, **options)
    exact = torch.linalg.solve(A + 1e-2 * torch.eye(300, dtype=torch.float64), b)
    diagonal = jacobi_preconditioner(A, 1e-2, method="exact", floor=1e-9)
    nystrom = nystrom_preconditioner(A, 160, 1e-2)
    kinds = {
        "tensor": diagonal,
        "callable": lambda block: diagonal[:, None] * block,
        "operator": torch.diag(diagonal),
        "user's": Wrapped(torch.diag(diagonal)),
        "Nyström": nystrom,
    }
    for name, preconditioner in kinds.items():
        fast = solve(A, b, preconditioner=preconditioner, **options)
        assert fast.iterations < plain.iterations / 3, name
        assert (fast.value - exact).norm() < 1e-4 * exact.norm(), name


def test_nystrom_matches_closed_form():
    values = torch.cat([torch.tensor([9.0, 4.0, 1.0]), torch.zeros(N - 3)]).double()
    A = symmetric(values)
    P = nystrom_preconditioner(A, 3, 0.5)
    torch.testing.assert_close(P.eigenvalues, torch.tensor([9.0, 4.0, 1.0], dtype=torch.float64), rtol=1e-9, atol=0)
    # The preconditioner maps all other eigenvalues to the smallest one that it keeps.
    eigenvectors = torch.linalg.eigh(A).eigenvectors.flip(1)
    scale = torch.ones(N, dtype=torch.float64)
    scale[:3] = 1.5 / (values[:3] + 0.5)
    expected = (eigenvectors * scale) @ eigenvectors.T
    torch.testing.assert_close(P(torch.eye(N, dtype=torch.float64)), expected, rtol=0, atol=1e-9)
    torch.testing.assert_close(P(B[:, 0]), P(B)[:, 0])
    assert P.products == 3
    assert nystrom_preconditioner(A.float(), 3, 0.5).eigenvectors.dtype == torch.float32


def test_nystrom_of_full_rank_is_the_inverse():
    P = nystrom_preconditioner(POSITIVE, N, 0.1)
    solution = solve(POSITIVE, B, damping=0.1, preconditioner=P, tol=1e-6)
    assert solution.iterations <= 2


def test_nystrom_rejects_negative_curvature():
    with pytest.raises(InputError, match="nystrom_preconditioner: A: expected a positive semi-definite operator"):
        nystrom_preconditioner(-POSITIVE, 10, 0.1)


def test_jacobi_is_positive_for_any_diagonal():
    d = torch.tensor([-2.0, 0.0, 1.0, 1e-9], dtype=torch.float64)
    torch.testing.assert_close(
        jacobi_preconditioner(torch.diag(d), floor=0.1), 1 / torch.tensor([2.0, 0.2, 1.0, 0.2], dtype=torch.float64)
    )


@pytest.mark.parametrize(
    ("method", "number", "message"),
    [
        ("cg", -1.0, "the preconditioner is not positive definite"),
        ("minres", -1.0, "solve: minres: .*the preconditioner is not positive definite"),
        ("minres", 0.0, "the preconditioner is singular"),
        ("gmres", 0.0, "the preconditioner is singular"),
        ("minres", math.nan, "solve: preconditioner: expected finite products"),
        ("gmres", math.inf, "solve: preconditioner: expected finite products"),
    ],
)
def test_rejects_preconditioner_that_is_not_positive_definite(method, number, message):
    kind = ConvergenceError if math.isfinite(number) else InputError
    with pytest.raises(kind, match=message):
        solve(POSITIVE, B, method=method, preconditioner=torch.full((N,), number))


def test_semidefinite_preconditioner_is_named_as_a_cause():
    diagonal = torch.ones(N)
    diagonal[0] = 0
    with pytest.raises(ConvergenceError, match="stagnated at the rounding of the operator, or of a singular precond"):
        solve(torch.diag(torch.arange(1.0, N + 1)), torch.ones(N), method="minres", preconditioner=diagonal)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: nystrom_preconditioner(POSITIVE, 0, 0.1), "nystrom_preconditioner: rank: expected an int of 1"),
        (lambda: nystrom_preconditioner(POSITIVE, 101, 0.1), "rank: expected at most n = 100"),
        (lambda: nystrom_preconditioner(POSITIVE, 5, 0.0), "nystrom_preconditioner: damping: expected a positive"),
        (lambda: jacobi_preconditioner(POSITIVE, -1.0), "jacobi_preconditioner: damping: expected a nonnegative"),
        (lambda: jacobi_preconditioner(POSITIVE, floor=2.0), "jacobi_preconditioner: floor: expected at most 1"),
        (
            lambda: jacobi_preconditioner(torch.zeros(3, 3)),
            "jacobi_preconditioner: A: expected a diagonal that is not zero",
        ),
        (lambda: jacobi_preconditioner(POSITIVE, products=1), "diagonal: products: expected"),
    ],
)
def test_preconditioners_reject_bad_arguments(call, message):
    with pytest.raises(InputError, match=message):
        call()
