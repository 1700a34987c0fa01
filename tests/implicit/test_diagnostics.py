"""Tests of the messages for points that are no solutions, singular Jacobians, and linear solvers that fail."""

import warnings

import pytest
import torch

from hodiff.errors import HodiffError, HodiffWarning
from hodiff.implicit import ConvergenceError, argmin, fixed_point, linear_solve, newton, picard, root, torch_optimizer

TWO = torch.tensor([2.0, 3.0], dtype=torch.float64)


def solver_that_returns_the_start(residual, x0, *params):
    return x0


def no_number(residual, x0, *params):
    return x0 * torch.nan


def gradient(f):
    p = TWO.clone().requires_grad_()
    return torch.autograd.grad(f(torch.ones_like(p), p).sum(), p)[0]


@pytest.mark.parametrize("solver", [solver_that_returns_the_start, no_number])
@pytest.mark.parametrize(
    "make",
    [
        lambda solver, **options: root(lambda x, p: x * x - p, solver, **options),
        lambda solver, **options: fixed_point(lambda x, p: (x + p / x) / 2, solver, **options),
        lambda solver, **options: argmin(lambda x, p: (x**3 / 3 - p * x).sum(), solver, **options),
    ],
    ids=["root", "fixed_point", "argmin"],
)
def test_wrong_solution_warns_or_raises(make, solver):
    with pytest.warns(HodiffWarning, match=r"does not solve.* residual (\d|nan)"):
        make(solver)(torch.ones_like(TWO), TWO)
    with pytest.raises(ConvergenceError, match="does not solve"):
        make(solver, throw=True)(torch.ones_like(TWO), TWO)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(solver, check=False)(torch.ones_like(TWO), TWO)


def test_residual_tol_decides_on_the_warning():
    nearly = lambda residual, x0, p: p.sqrt() + 1e-4  # noqa: E731
    with pytest.warns(HodiffWarning, match="residual"):
        root(lambda x, p: x * x - p, nearly)(TWO, TWO)
    root(lambda x, p: x * x - p, nearly, residual_tol=1e-3)(TWO, TWO)


@pytest.mark.parametrize("unit", [1e-30, 1e-10, 1e10, 1e30])
def test_residual_check_does_not_depend_on_units(unit):
    equation = lambda x, p: unit * (x * x - p)  # noqa: E731
    torch.testing.assert_close(root(equation, newton(), throw=True)(torch.ones_like(TWO), TWO), TWO.sqrt())
    for away in (1e-6, 1e-2):
        with pytest.raises(ConvergenceError, match="does not solve"):
            root(equation, lambda residual, x0, p, away=away: p.sqrt() + away, throw=True)(TWO, TWO)
    with pytest.raises(ConvergenceError, match="does not solve"):
        argmin(lambda x, p: unit * (x - p).square().sum(), solver_that_returns_the_start, throw=True)(
            torch.ones_like(TWO), TWO
        )


def test_failed_element_of_a_batch_warns():
    f = root(lambda x, p: x * x - p, newton(max_iterations=3))
    ps = torch.tensor([1.0, 1e6], dtype=torch.float64)
    with pytest.warns(HodiffWarning, match="does not solve"):
        found = torch.func.vmap(lambda p: f(torch.ones_like(p), p))(ps)
    assert found[0] == 1


def test_singular_jacobian_warns():
    # At a double root the derivative of the residual vanishes.
    f = root(lambda x, p: (x - p) ** 2, lambda residual, x0, p: p.clone())
    with pytest.warns(HodiffWarning, match="is singular: the smallest pivot is 0.0e"):
        found = gradient(f)
    assert not found.isfinite().all()
    throwing = root(lambda x, p: (x - p) ** 2, lambda residual, x0, p: p.clone(), throw=True)
    with pytest.raises(ConvergenceError, match="singular"):
        gradient(throwing)


def test_numerically_singular_matrix_raises():
    nearly = SINGULAR + torch.tensor([[0.0, 0.0], [0.0, 4e-16]], dtype=torch.float64)
    with pytest.raises(ConvergenceError, match="is singular"):
        linear_solve(lambda x: nearly @ x, INCONSISTENT, throw=True)
    ill = SINGULAR + torch.tensor([[0.0, 0.0], [0.0, 1e-10]], dtype=torch.float64)
    assert linear_solve(lambda x: ill @ x, INCONSISTENT, throw=True).isfinite().all()


def test_different_units_do_not_make_a_matrix_singular():
    scales = torch.tensor([1e-30, 1.0, 1e30], dtype=torch.float64)
    torch.testing.assert_close(linear_solve(lambda x: scales * x, scales), torch.ones_like(scales))


SINGULAR = torch.tensor([[1.0, 2.0], [2.0, 4.0]], dtype=torch.float64)
INCONSISTENT = torch.tensor([1.0, 0.0], dtype=torch.float64)


@pytest.mark.parametrize("method", ["dense", "cg", "minres", "gmres", "lsmr", "neumann"])
def test_singular_system_warns_by_every_method(method):
    said = "is singular: the smallest pivot" if method == "dense" else f"'{method}' did not converge"
    with pytest.warns(HodiffWarning, match=said):
        linear_solve(lambda x: SINGULAR @ x, INCONSISTENT, method=method, symmetric=True)
    with pytest.raises(ConvergenceError, match="singular"):
        linear_solve(lambda x: SINGULAR @ x, INCONSISTENT, method=method, throw=True)


@pytest.mark.parametrize("method", ["dense", "sparse", "cg", "minres", "gmres", "lsmr", "neumann", lambda matvec, b: b])
def test_affine_product_warns(method):
    b, p = torch.tensor([3.0, 4.0], dtype=torch.float64), torch.tensor(1.5, dtype=torch.float64)
    with pytest.warns(HodiffWarning, match=r"not linear: matvec\(0\) is not 0; subtract this constant"):
        linear_solve(lambda x, p: p * x + 1, b, p, method=method)
    # The advice gives the solution.
    if isinstance(method, str):
        torch.testing.assert_close(linear_solve(lambda x, p: p * x, b - 1, p, method=method), (b - 1) / p)
    with pytest.warns(HodiffWarning, match=r"not linear: matvec\(2 \* x\) is not 2 \* matvec\(x\)"):
        linear_solve(lambda x, p: p * x * x.abs(), b, p, method=method)


@pytest.mark.parametrize("method", ["cg", "minres", "gmres", "lsmr", "neumann"])
def test_iteration_limit_raises(method, generator):
    root_of = torch.randn(30, 30, dtype=torch.float64, generator=generator) / 30**0.5
    matrix = root_of @ root_of.T / 8 + 0.01 * torch.eye(30, dtype=torch.float64)
    b = torch.ones(30, dtype=torch.float64)
    with pytest.raises(ConvergenceError, match=rf"'{method}' did not converge: relative residual \d.*e[+-]\d\d"):
        linear_solve(lambda x: matrix @ x, b, method=method, max_iterations=3, throw=True)
    x = linear_solve(lambda x: matrix @ x, b, method=method, max_iterations=20000, tol=1e-9, symmetric=True)
    assert (matrix @ x - b).norm() < 1e-8 * b.norm()


def test_method_for_another_kind_of_matrix_raises():
    rotation = torch.tensor([[0.0, 1.0], [-1.0, 0.0]], dtype=torch.float64)
    for method in ("cg", "neumann"):
        with pytest.raises(ConvergenceError, match="did not converge"):
            linear_solve(lambda x: rotation @ x, INCONSISTENT, method=method, throw=True)


def test_failed_linear_solver_of_a_derivative_warns():
    f = fixed_point(lambda x, p: (x + p) / 1.01, picard(max_iterations=5000), linear_solver="neumann", max_iterations=5)
    with pytest.warns(HodiffWarning, match="fixed_point: the linear solver 'neumann' did not converge"):
        gradient(f)


def test_nan_in_the_jacobian_warns():
    f = root(lambda x, p: (x - p).abs().sqrt(), lambda residual, x0, p: p.clone())
    with pytest.warns(HodiffWarning, match="singular"):
        gradient(f)


def test_optimizer_with_too_few_steps_warns():
    f = argmin(lambda x, p: ((x - p) ** 2).sum(), torch_optimizer(torch.optim.SGD, steps=3, lr=0.1))
    with pytest.warns(HodiffWarning, match="argmin: the solver's result"):
        f(torch.zeros_like(TWO), TWO)


def test_convergence_error_is_a_hodiff_error():
    assert issubclass(ConvergenceError, HodiffError)
