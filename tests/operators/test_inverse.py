"""Tests of inverse operators against torch.linalg."""

from typing import Any

import pytest
import torch
from cases import ravel
from operators.cases import close, problem
from torch import Tensor

import hodiff
from hodiff.estimators import jacobi_preconditioner
from hodiff.operators import (
    DiagonalOperator,
    GaussNewtonOperator,
    HessianOperator,
    InverseOperator,
    JacobianOperator,
    MatrixOperator,
)

SYMMETRIC = ["cg", "minres", "gmres", "lsmr", "neumann", "dense"]


def positive(n: int = 6) -> Tensor:
    R = torch.randn(n, n).double()
    return R @ R.T / n + torch.eye(n).double()


@pytest.mark.parametrize("method", SYMMETRIC)
def test_inverse_of_positive_matrix_matches(method: str) -> None:
    S, B = positive(), torch.randn(6, 3).double()
    inverse = MatrixOperator(S, symmetric=True).inverse(method, tol=1e-9, damping=0.0)
    expected = torch.linalg.solve(S, B)
    assert inverse.symmetric
    assert inverse.last_report is None
    close(inverse @ B, expected, 1e-8)
    close(inverse @ B[:, 0], expected[:, 0], 1e-8)
    close(inverse.T @ B, expected, 1e-8)
    assert inverse.last_report.converged
    assert inverse.last_report.method == method
    assert (inverse @ B[:, :0]).shape == (6, 0)
    assert not (inverse @ torch.zeros(6).double()).any()
    assert inverse.to_dense().shape == (6, 6)


@pytest.mark.parametrize("method", ["cg", "minres", "gmres", "neumann", "dense"])
def test_damping_is_added(method: str) -> None:
    S, b = positive() - torch.eye(6).double(), torch.randn(6).double()
    inverse = MatrixOperator(S, symmetric=True).inverse(method, damping=0.7, tol=1e-9)
    close(inverse @ b, torch.linalg.solve(S + 0.7 * torch.eye(6).double(), b), 1e-7)
    assert (inverse.last_report.iterations == 0) == (method == "dense")


@pytest.mark.parametrize("method", ["gmres", "lsmr", "dense"])
def test_inverse_of_asymmetric_matrix_matches(method: str) -> None:
    M, B = torch.randn(6, 6).double() + 4 * torch.eye(6).double(), torch.randn(6, 2).double()
    inverse = MatrixOperator(M).inverse(method, tol=1e-10)
    assert not inverse.symmetric
    close(inverse @ B, torch.linalg.solve(M, B), 1e-8)
    close(inverse.T @ B, torch.linalg.solve(M.T, B), 1e-8)


def test_pseudo_inverse_matches() -> None:
    M = torch.randn(8, 3).double()
    inverse = MatrixOperator(M).inverse("lsmr", tol=1e-10)
    assert inverse.shape == (3, 8)
    close(inverse.to_dense(), torch.linalg.pinv(M), 1e-8)
    close(inverse.T.to_dense(), torch.linalg.pinv(M).T, 1e-8)


@pytest.mark.parametrize("shape", [(3, 1), (1, 3), (3,)])
def test_least_squares_with_jacobians_of_any_shape_match(shape: tuple[int, ...]) -> None:
    """A column (n, 1) is a block for the solver, not the single leaf of x."""
    M = torch.randn(5, 3).double()
    J = JacobianOperator(lambda x: {"y": (M @ x.reshape(3))[:, None]}, torch.randn(shape).double())
    inverse = J.inverse("lsmr", tol=1e-10)
    b = torch.randn(5).double()
    close(inverse @ b, torch.linalg.pinv(M) @ b, 1e-8)
    assert (inverse @ {"y": b[:, None]}).shape == shape


def test_newton_step_accepts_pytrees() -> None:
    p = problem("regression")
    A = HessianOperator(p.objective(), p.x, data=p.batches(2))
    H = p.hessian() + 3 * torch.eye(A.shape[0]).double()
    step = A.inverse(damping=3.0, tol=1e-10) @ p.x
    assert step.keys() == p.x.keys()
    close(ravel(step), torch.linalg.solve(H, ravel(p.x)), 1e-8)


@pytest.mark.slow
def test_operator_times_inverse_is_identity() -> None:
    p = problem("sequence")
    A = GaussNewtonOperator(p.model, p.loss.function, p.x, p.inputs, p.targets).damped(0.1)
    identity = torch.eye(A.shape[0]).double()
    close((A @ A.inverse(tol=1e-11)).to_dense(), identity, 1e-7)
    close((A.inverse("dense") @ A).to_dense(), identity, 1e-7)
    close(A.inverse(tol=1e-11).inverse("gmres", tol=1e-8).to_dense(), A.to_dense(), 1e-5)


def test_dense_method_factorizes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    S = positive()
    products = 0

    class Counted(MatrixOperator):
        def multiply(self, block: Tensor) -> Tensor:
            nonlocal products
            products += block.shape[1]
            return super().multiply(block)

    factorizations = 0
    factorize = torch.linalg.lu_factor_ex

    def counted(*arguments: Any) -> Any:
        nonlocal factorizations
        factorizations += 1
        return factorize(*arguments)

    monkeypatch.setattr(torch.linalg, "lu_factor_ex", counted)
    inverse = Counted(S, symmetric=True).inverse("dense")
    for _ in range(3):
        inverse @ torch.randn(6).double()
        assert inverse.last_report.iterations == 0
    assert (products, factorizations) == (6, 1)


def test_factors_also_solve_with_the_transpose() -> None:
    M, b = torch.randn(6, 6).double() + 4 * torch.eye(6).double(), torch.randn(6).double()
    inverse = MatrixOperator(M).inverse("dense")
    for operator, matrix in ((inverse, M), (inverse.T, M.T)):
        close(operator @ b, torch.linalg.solve(matrix, b))
        assert inverse.last_report.iterations == 0


def test_preconditioner_saves_iterations() -> None:
    d = torch.logspace(0, 5, 60).double()
    A = DiagonalOperator(d) + MatrixOperator(0.1 * torch.ones(60, 60).double(), symmetric=True)
    b = torch.ones(60).double()
    plain, better = A.inverse(), A.inverse(preconditioner=jacobi_preconditioner(A))
    close(plain @ b, better @ b, 1e-4)
    assert better.last_report.iterations < plain.last_report.iterations / 2
    by_operator = A.inverse(preconditioner=DiagonalOperator(1 / d))
    by_operator @ b
    assert by_operator.last_report.iterations < plain.last_report.iterations / 2


def test_inverse_operator_may_be_a_preconditioner() -> None:
    S = positive(12)
    A = MatrixOperator(S, symmetric=True)
    outer = A.inverse(preconditioner=A.inverse("dense"))
    outer @ torch.randn(12).double()
    assert outer.last_report.iterations == 1


def test_solution_is_differentiable_in_the_right_hand_side() -> None:
    S, b = positive(), torch.randn(6).double()
    inverse = MatrixOperator(S, symmetric=True).inverse(tol=1e-12)
    jacobian = torch.func.jacrev(lambda b: inverse @ b)(b)
    close(jacobian, torch.linalg.inv(S), 1e-8)


def test_unreached_tolerance_raises_or_warns() -> None:
    A = MatrixOperator(torch.diag(torch.logspace(0, 6, 30).double()), symmetric=True)
    b = torch.ones(30).double()
    with pytest.raises(hodiff.ConvergenceError, match="max_iterations=3"):
        A.inverse(max_iterations=3) @ b
    inverse = A.inverse(max_iterations=3, throw=False)
    with pytest.warns(hodiff.HodiffWarning, match="max_iterations=3"):
        inverse @ b
    assert not inverse.last_report.converged
    with pytest.raises(hodiff.ConvergenceError, match="singular"):
        MatrixOperator(torch.zeros(2, 2)).inverse("dense") @ torch.ones(2)
    with pytest.raises(hodiff.ConvergenceError, match="negative curvature"):
        DiagonalOperator(torch.tensor([1.0, -1.0])).inverse() @ torch.ones(2)


def test_bfloat16_operator_is_inverted() -> None:
    inverse = DiagonalOperator(torch.tensor([2.0, 4.0], dtype=torch.bfloat16)).inverse()
    close(inverse @ torch.ones(2), torch.tensor([0.5, 0.25]), 1e-2)


def test_rejects_bad_arguments() -> None:
    A = MatrixOperator(torch.ones(3, 2))
    with pytest.raises(hodiff.InputError, match="InverseOperator: method: expected one of 'cg'"):
        A.inverse("newton")
    with pytest.raises(hodiff.InputError, match="InverseOperator: A: expected a square operator"):
        A.inverse("cg")
    with pytest.raises(hodiff.InputError, match="InverseOperator: A: expected a hodiff LinearOperator"):
        InverseOperator(torch.eye(2))
    with pytest.raises(hodiff.InputError, match="damping"):
        DiagonalOperator(torch.ones(2)).inverse(damping=-1.0) @ torch.ones(2)


def test_solve_accepts_one_column_for_a_column_leaf():
    matrix = torch.tensor([[2.0, 1.0], [0.0, 3.0], [1.0, 1.0]], dtype=torch.float64)
    J = hodiff.JacobianOperator(lambda x: matrix @ x, torch.zeros(2, 1, dtype=torch.float64))
    b = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    expected = torch.linalg.lstsq(matrix, b[:, None]).solution[:, 0]
    assert torch.allclose(hodiff.estimators.solve(J, b, method="lsmr", tol=1e-10).value, expected, atol=1e-8)


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("method", ["dense", "cg"])
def test_inverse_of_a_differentiated_factor_is_refused(method, requires_grad):
    """Products with the operator have a derivative by the factor, and solutions would lose it in silence."""
    c = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    v = torch.ones(3, dtype=torch.float64, requires_grad=requires_grad)
    A = c * MatrixOperator(torch.eye(3, dtype=torch.float64), symmetric=True)
    assert torch.autograd.grad((A @ v).sum(), c)[0] == 3
    with pytest.raises(hodiff.InputError, match="InverseOperator @ v: expected an operator of constants"):
        A.inverse(method) @ v
    with torch.no_grad():
        torch.testing.assert_close(A.inverse(method) @ v, v / 2)
