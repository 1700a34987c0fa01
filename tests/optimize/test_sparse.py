"""Tests of sparse Hessians in `minimize`: the steps of dense Hessians, Newton's method, minimal surfaces, errors."""

import numpy as np
import pytest
import scipy.optimize as so
import scipy.sparse
import torch
from cases import rosenbrock

import hodiff
from hodiff.optimize import minimize
from hodiff.optimize.bounds import constraints_of
from hodiff.optimize.hessian_factors import DenseMatrix, SparseMatrix
from hodiff.optimize.methods import METHODS
from hodiff.optimize.newton import newton_direction
from hodiff.optimize.variables import Variables

D = torch.float64
START = torch.tensor([-1.2, 1.0, 0.8, 0.5, 2.0], dtype=D)
SPARSE = [name for name, method in METHODS.items() if method.sparse]


def gradient_norms(f, **arguments):
    norms = []
    found = minimize(f, **arguments, callback=lambda r: norms.append(float(torch.func.grad(f)(r.x).norm())))
    return found, np.array(norms)


@pytest.mark.parametrize("method", SPARSE)
def test_steps_match_dense_derivatives(method):
    runs = []
    for sparse in (False, True):
        steps = []
        start = {"a": START[:2], "b": (START[2], START[3:])}
        found = minimize(
            lambda x: rosenbrock(torch.cat([x["a"], x["b"][0][None], x["b"][1]])),
            start,
            method=method,
            sparse=sparse,
            options={"maxiter": 15},
            callback=lambda r, steps=steps: steps.append(torch.cat([r.x["a"], r.x["b"][0][None], r.x["b"][1]]).numpy()),
        )
        assert (found.nhev > 0) == (sparse or method == "newton")
        runs.append(steps)
    for k, (one, other) in enumerate(zip(*runs, strict=True)):
        np.testing.assert_allclose(one, other, rtol=1e-12 * 10 ** (k / 2))


@pytest.mark.parametrize("sparse", [False, True])
def test_newton_step_matches_formula(sparse):
    """The step is Newton's if the Hessian is positive definite and the full step suffices."""
    x0 = torch.full((5,), 1.02, dtype=D)
    step = np.linalg.solve(so.rosen_hess(x0.numpy()), so.rosen_der(x0.numpy()))
    found = minimize(rosenbrock, x0, method="newton", sparse=sparse, options={"maxiter": 1})
    np.testing.assert_allclose(found.x.numpy(), x0.numpy() - step, rtol=1e-13)
    assert found.nit == 1
    assert "aximum number of iterations" in found.message


def test_ten_thousand_unknowns_converge_quadratically():
    found, norms = gradient_norms(
        rosenbrock, x0=torch.full((10_000,), 2.0, dtype=D), method="newton", sparse=True, tol=1e-10
    )
    assert found.success
    assert found.nhev == found.nit < 20
    torch.testing.assert_close(found.x, torch.ones(10_000, dtype=D), rtol=0, atol=1e-10)
    (last,) = np.nonzero((norms < 1e-2) & (norms > 1e-7))
    assert len(last) >= 2
    assert (norms[last + 1] <= 100 * norms[last] ** 2).all()


def scherk(side):
    """Return Scherk's surface, a minimal surface in closed form, and the area of triangulations with that boundary."""
    t = torch.linspace(-1, 1, side + 2, dtype=D)
    z = torch.log(torch.cos(t) / torch.cos(t)[:, None])
    edge = z.clone()
    edge[1:-1, 1:-1] = 0
    h = 2 / (side + 1)

    def area(x):
        u = torch.nn.functional.pad(x.view(side, side), (1, 1, 1, 1)) + edge
        dx, dy = (u[1:, :-1] - u[:-1, :-1]) / h, (u[:-1, 1:] - u[:-1, :-1]) / h
        dx2, dy2 = (u[1:, 1:] - u[:-1, 1:]) / h, (u[1:, 1:] - u[1:, :-1]) / h
        return ((1 + dx**2 + dy**2).sqrt() + (1 + dx2**2 + dy2**2).sqrt()).sum() * h * h / 2

    return area, z[1:-1, 1:-1]


def surface_error(side):
    area, exact = scherk(side)
    found, norms = gradient_norms(
        area,
        x0=torch.zeros(side * side, dtype=D),
        method="newton",
        sparse=True,
        options={"gtol": 1e-8, "norm": 2.0},
    )
    assert found.success
    assert norms[-1] <= 1e-8
    assert norms[-2] ** 2 < norms[-1] * 1e6  # two steps show the order of convergence
    assert norms[-1] < 100 * norms[-2] ** 2
    return float((found.x.view(side, side) - exact).abs().max())


def test_minimal_surface_error_is_second_order():
    coarse, fine = surface_error(20), surface_error(41)
    assert coarse < 2e-4
    assert coarse / fine == pytest.approx(4, rel=0.1)


@pytest.mark.slow
def test_minimal_surface_of_90_000_unknowns_converges():
    assert surface_error(300) < 1e-6


def matrices():
    generator = torch.Generator().manual_seed(0)
    for lowest in (-3.0, -1e-3, 1e-3, 2.0):
        q, _ = torch.linalg.qr(torch.randn(6, 6, dtype=D, generator=generator))
        yield q @ torch.diag(torch.tensor([lowest, 1, 2, 3, 4, 5], dtype=D)) @ q.T
    yield torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=D)
    yield torch.zeros(2, 2, dtype=D)
    yield -torch.eye(3, dtype=D)


@pytest.mark.parametrize("matrix", list(matrices()))
def test_newton_direction_descends_with_a_positive_definite_shift(matrix):
    slope = torch.linspace(-1, 2, len(matrix), dtype=D)
    lowest = float(torch.linalg.eigvalsh(matrix)[0])
    for made in (DenseMatrix(matrix), SparseMatrix(scipy.sparse.csr_array(matrix.numpy()))):
        direction, shift = newton_direction(made, slope, 0.0)
        assert (shift == 0) == (lowest > 0)
        assert shift > -lowest
        shifted = matrix + shift * torch.eye(len(matrix), dtype=D)
        torch.testing.assert_close(shifted @ direction, -slope)
        for each in (0.0, 0.5 * abs(lowest), 2 * abs(lowest)):
            solved = made.solve(each, slope)
            assert (solved is None) == (lowest + each <= 0)


def test_nan_matrix_has_no_newton_direction():
    nothing = torch.full((2, 2), torch.nan, dtype=D)
    assert newton_direction(DenseMatrix(nothing), torch.ones(2, dtype=D), 0.0) is None


def test_start_with_indefinite_hessian_converges():
    """Every second unknown has negative curvature at the start."""

    def double_wells(x):
        return ((x**2 - 1) ** 2).sum() + 0.1 * (x[1:] - x[:-1]).square().sum()

    start = torch.tensor([0.1, 1.5], dtype=D).repeat(20)
    found = minimize(double_wells, start, method="newton", sparse=True, tol=1e-10)
    assert found.success
    torch.testing.assert_close(found.x, torch.ones(40, dtype=D), rtol=0, atol=1e-9)


@pytest.mark.slow
def test_given_coloring_gives_the_same_result():
    coloring = hodiff.sparse.color(hodiff.sparse.hessian_pattern(rosenbrock, START))
    for method in SPARSE:
        found, alone = (minimize(rosenbrock, START, method=method, sparse=each) for each in (coloring, True))
        torch.testing.assert_close(found.x, alone.x)


def test_pattern_is_found_once():
    """The pattern takes one call of the function, and then each Hessian takes one."""
    calls = []

    def counted(x):
        calls.append(None)
        return rosenbrock(x)

    found = minimize(counted, START, method="newton", sparse=True)
    assert len(calls) == found.nfev + found.nhev + 1


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", [so.NonlinearConstraint, so.LinearConstraint])
def test_sparse_constraints_with_bounds_match_dense(kind):
    """The steps match those with dense Jacobians and Hessians."""
    x0 = torch.linspace(0.3, 0.9, 6, dtype=D)
    if kind is so.NonlinearConstraint:
        constraints = [kind(lambda x: x[1:] * x[:-1], 0.1, 0.7), kind(lambda x: x.square().sum(), 0, 4)]
    else:
        constraints = kind(np.eye(2, 6), 0.2, 0.8)
    runs = []
    for sparse in (False, True):
        runs.append(
            minimize(
                rosenbrock,
                x0,
                method="trust-constr",
                sparse=sparse,
                bounds=(0.0, 1.2),
                constraints=constraints,
                options={"maxiter": 30},
            )
        )
    dense, found = runs
    assert dense.nit == found.nit
    assert all(map(scipy.sparse.issparse, found.constr_jac))
    torch.testing.assert_close(found.x, dense.x, rtol=1e-6, atol=0)


def test_constraint_jacobians_and_hessians_are_sparse():
    x, v = np.linspace(0.3, 0.9, 6), np.arange(1.0, 6.0)
    given = so.NonlinearConstraint(lambda x: x[1:] * x[:-1] ** 2, 0, 1)
    (made,) = constraints_of("minimize", given, Variables(torch.from_numpy(x)), x, curved=True, sparse=True)
    jacobian, hessian = made.jac(x), made.hess(x, v)
    assert isinstance(jacobian, scipy.sparse.csr_array)
    assert isinstance(hessian, scipy.sparse.csr_array)
    rows = np.arange(5)
    expected = np.zeros((5, 6))
    expected[rows, rows], expected[rows, rows + 1] = 2 * x[1:] * x[:-1], x[:-1] ** 2
    np.testing.assert_allclose(jacobian.toarray(), expected, rtol=1e-14)
    upper = np.diag(2 * v * x[:-1], 1)
    np.testing.assert_allclose(hessian.toarray(), upper + upper.T + np.diag(np.append(2 * v * x[1:], 0)), rtol=1e-14)


def test_non_finite_start_is_no_success():
    start = torch.tensor([float("nan"), 1.0], dtype=D)
    for method in SPARSE:
        limit = {"maxiter": 20} if method == "trust-constr" else None
        found = minimize(rosenbrock, start, method=method, sparse=True, options=limit)
        assert not found.success
        assert "nan" in found.message


def test_float32_and_argmin_work():
    found = minimize(rosenbrock, START.float().abs(), method="newton", sparse=True, tol=1e-3)
    assert found.x.dtype is torch.float32
    torch.testing.assert_close(found.x, torch.ones(5), rtol=0, atol=1e-3)
    solver = lambda f, x0, p: minimize(f, x0, p, method="newton", sparse=True, tol=1e-10)  # noqa: E731
    x = hodiff.implicit.argmin(lambda x, p: (x**4 / 4 + x**2 / 2 - p * x).sum(), solver, linear_solver="sparse")
    p = torch.tensor([2.0, 0.3], dtype=D)
    slope = torch.func.jacrev(lambda p: x(torch.zeros(2, dtype=D), p))(p)
    torch.testing.assert_close(slope, torch.diag(1 / (3 * x(torch.zeros(2, dtype=D), p) ** 2 + 1)))


def small(n):
    return hodiff.sparse.color(scipy.sparse.eye_array(n, format="csr"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sparse": "yes"}, "sparse: expected True, False or a hodiff.sparse.Coloring, got str 'yes'"),
        ({"sparse": np.eye(5)}, "sparse: expected True, False or a hodiff.sparse.Coloring, got ndarray"),
        (
            {"method": "trust-exact"},
            "sparse: expected False, because method='trust-exact' supports no sparse .* method='newton' or",
        ),
        ({"method": "bfgs"}, "sparse: expected False, because method='bfgs' supports no sparse Hessian"),
        ({"method": "trust-exact", "batched": True}, "sparse: expected False with batched=True"),
        ({"sparse": small(4)}, r"sparse: pattern: expected a pattern of shape \(5, 5\), got \(4, 4\)"),
        ({"sparse": small(5)}, "sparse: pattern: expected a pattern with all entries of the derivative"),
        ({"sparse": hodiff.sparse.color(np.eye(5) > 0, "rows")}, "sparse: coloring: expected one by 'star'"),
        ({"bounds": (0, 1)}, "bounds: expected None, because method='newton' does not support it"),
        ({"options": {"c1": 0.9, "c2": 0.1}}, "expected 0 < c1 < c2 < 1"),
        ({"options": {"eta": 0.1}}, "expected options of method='newton', got 'eta'"),
    ],
)
def test_rejects_bad_arguments(options, words):
    with pytest.raises(hodiff.InputError, match=f"^minimize: .*{words}"):
        minimize(rosenbrock, START, **{"method": "newton", "sparse": True, **options})


def test_rejects_complex_unknowns():
    with pytest.raises(hodiff.InputError, match=r"^minimize: sparse: expected False for complex x0"):
        minimize(lambda z: z.abs().square().sum(), torch.ones(2, dtype=torch.complex128), method="newton", sparse=True)


def test_branches_on_values_use_the_pattern_at_each_point():
    def branching(x):
        return rosenbrock(x) if x[0] > 0 else rosenbrock(2 * x)

    with pytest.warns(hodiff.HodiffWarning, match="The pattern at this x is used, checked by a product"):
        found = minimize(branching, START, method="newton", sparse=True)
    torch.testing.assert_close(found.x, minimize(branching, START, method="newton").x, rtol=1e-6, atol=1e-8)
