"""Linear systems by every method against NumPy, and their failures."""

import numpy as np
import pytest
import torch
from estimators.matrices import Wrapped, linspace_spectrum, symmetric

from hodiff import HodiffWarning, InputError
from hodiff.estimators import ConvergenceError, solve

N = 100
POSITIVE = symmetric(torch.logspace(0, -2, N, dtype=torch.float64))
INDEFINITE = symmetric(torch.cat([linspace_spectrum(50, -1, -0.1), linspace_spectrum(50, 0.1, 1)]))
GENERAL = torch.eye(N, dtype=torch.float64) + 0.3 * torch.triu(symmetric(linspace_spectrum(N, -1)))
B = torch.randn(N, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
METHODS = {
    "cg": POSITIVE,
    "minres": INDEFINITE,
    "gmres": GENERAL,
    "lsmr": GENERAL,
    "neumann": POSITIVE,
    "dense": GENERAL,
}


def by_numpy(A, b, damping=0.0):
    return torch.from_numpy(np.linalg.solve((A + damping * torch.eye(N, dtype=torch.float64)).numpy(), b.numpy()))


@pytest.mark.one_in(6)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("damping", [0.0, 0.05])
@pytest.mark.parametrize("b", [B, B[:, 0], B[:, :1]], ids=["block", "vector", "one column"])
def test_solutions_match_numpy(method, damping, b):
    A = Wrapped(METHODS[method]) if method != "lsmr" else METHODS[method]
    solution = solve(A, b, method=method, damping=damping, tol=1e-8, max_iterations=5000)
    exact = by_numpy(METHODS[method], b, damping)
    assert solution.value.shape == b.shape
    assert (solution.value - exact).norm() < 3e-6 * exact.norm()
    residual = (METHODS[method] + damping * torch.eye(N, dtype=torch.float64)) @ solution.value - b
    torch.testing.assert_close(solution.residual, residual.norm(dim=0), rtol=1e-3, atol=1e-12)
    assert solution.residual.shape == b.shape[1:]
    if method != "lsmr":
        assert (residual.norm(dim=0) <= 1e-8 * b.norm(dim=0)).all()
        assert solution.products == A.products
    assert (solution.converged, solution.reason, solution.method) == (True, "converged", method)
    assert 0 < solution.iterations <= 5000


@pytest.mark.parametrize("method", METHODS)
def test_float32_solutions_match_numpy(method):
    solution = solve(METHODS[method].float(), B.float(), method=method, damping=0.05)
    assert solution.value.dtype == torch.float32
    exact = by_numpy(METHODS[method], B, 0.05)
    assert (solution.value.double() - exact).norm() < 2e-3 * exact.norm()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("size", "right"), [(1e-20, 1.0), (1e20, 1.0), (1.0, 1e14), (1e-6, 1e10), (1e20, 1e-20)])
def test_solutions_have_the_scale_of_the_system(method, size, right):
    solution = solve(size * METHODS[method], right * B, method=method, max_iterations=5000)
    exact = by_numpy(METHODS[method], B)
    assert (solution.value * (size / right) - exact).norm() < 1e-3 * exact.norm()


@pytest.mark.parametrize("method", ["cg", "minres", "gmres"])
@pytest.mark.parametrize(("size", "scale"), [(1e-20, 1e20), (1e20, 1e-20), (1.0, 1e20), (1.0, 1e-20)])
def test_preconditioned_solutions_have_the_scale_of_the_system(method, size, scale):
    A = POSITIVE + torch.diag(torch.arange(0.0, N, dtype=torch.float64))
    solution = solve(size * A, B, method=method, preconditioner=scale / A.diagonal())
    exact = by_numpy(A, B)
    assert (solution.value * size - exact).norm() < 1e-3 * exact.norm()


def test_converged_float32_solution_has_the_stated_residual():
    # The recurrence's residual keeps falling after the true residual has stagnated.
    A = symmetric(torch.logspace(0, -4, N, dtype=torch.float64)).float()
    with pytest.warns(HodiffWarning, match="stagnated at the rounding of the operator|reached max_iterations"):
        solution = solve(A, B.float(), tol=1e-12, throw=False)
    true = (A.double() @ solution.value.double() - B.float().double()).norm(dim=0)
    assert not solution.converged
    torch.testing.assert_close(solution.residual.double(), true, rtol=0.5, atol=0)


def test_residual_corrections_reach_a_tight_tolerance():
    A = symmetric(torch.logspace(0, -5, N, dtype=torch.float64))
    solution = solve(A, B[:, 0], tol=1e-11, max_iterations=5000)
    assert ((A @ solution.value - B[:, 0]).norm() / B[:, 0].norm()).item() <= 1.1e-11


@pytest.mark.parametrize("method", METHODS)
def test_warm_start_takes_fewer_iterations(method):
    A = METHODS[method]
    options = {"method": method, "damping": 0.05}
    cold = solve(A, B, **options)
    start = cold.value + 1e-4 * B
    warm = solve(A, B, x0=start, **options)
    assert warm.converged
    if method == "dense":
        return
    assert warm.iterations < cold.iterations
    at_once = solve(A, B, x0=by_numpy(A, B, 0.05), **options)
    assert at_once.iterations == 0
    assert at_once.products <= 9


@pytest.mark.parametrize("method", METHODS)
def test_right_hand_side_of_zeros_has_the_solution_zero_from_any_start(method):
    b = torch.stack([torch.zeros(N, dtype=torch.float64), B[:, 0]], 1)
    found = solve(METHODS[method], b, method=method, x0=torch.ones_like(b), max_iterations=5000)
    assert (found.value[:, 0] == 0).all()
    assert found.residual[0] == 0
    exact = by_numpy(METHODS[method], B[:, 0])
    assert (found.value[:, 1] - exact).norm() < 1e-3 * exact.norm()


def test_least_squares_of_a_right_hand_side_orthogonal_to_the_range_are_zero_from_any_start():
    A = torch.eye(5, 3, dtype=torch.float64) / torch.tensor([1.0, 3.0, 7.0], dtype=torch.float64)
    b = torch.tensor([0.0, 0, 0, 1, 2], dtype=torch.float64)
    assert (solve(A, b, method="lsmr", x0=torch.ones(3, dtype=torch.float64)).value == 0).all()


def test_converged_columns_are_no_longer_multiplied():
    A = Wrapped(POSITIVE)
    eigenvector = torch.linalg.eigh(POSITIVE).eigenvectors[:, -1]
    b = torch.stack([eigenvector, B[:, 0], torch.zeros(N)], 1)
    solution = solve(A, b)
    alone = solve(POSITIVE, B[:, 0])
    assert solution.iterations == alone.iterations
    # The first column adds one iteration and one true residual; the last column adds no product.
    assert A.products == alone.products + 2
    assert not solution.value[:, 2].any()


def test_columns_of_a_block_match_single_solutions():
    together = solve(POSITIVE, B, tol=1e-9).value
    alone = torch.stack([solve(POSITIVE, b, tol=1e-9).value for b in B.unbind(1)], 1)
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-6)


def test_cg_takes_as_many_iterations_as_distinct_eigenvalues():
    A = symmetric(torch.tensor([1.0, 2.0, 5.0, 9.0], dtype=torch.float64).repeat(25))
    assert solve(A, B, tol=1e-10).iterations == 4


def test_negative_curvature_raises_with_a_remedy():
    message = (
        r"solve: cg: negative curvature met at iteration \d+: A \+ damping I is not positive definite; raise damping "
        r'or use method="minres"'
    )
    with pytest.raises(ConvergenceError, match=message) as caught:
        solve(INDEFINITE, B[:, 0])
    assert not caught.value.result.converged
    with pytest.raises(ConvergenceError, match=r"negative curvature met at iteration 1:"):
        solve(-POSITIVE, B[:, 0])
    with pytest.warns(HodiffWarning, match="negative curvature") as record:
        solution = solve(torch.diag(torch.cat([torch.ones(50), -torch.ones(50)])), B.float(), throw=False)
    assert record[0].filename == __file__
    assert "negative curvature" in solution.reason


def test_failed_column_does_not_affect_other_columns():
    A = torch.diag(torch.cat([torch.ones(50), -torch.ones(50)]).double())
    good, bad = torch.zeros(N, dtype=torch.float64), torch.zeros(N, dtype=torch.float64)
    good[:50], bad[50:] = 1.0, 1.0
    with pytest.warns(HodiffWarning, match="column 1: negative curvature"):
        solution = solve(A, torch.stack([good, bad], 1), throw=False)
    torch.testing.assert_close(solution.value[:, 0], good)
    assert solution.residual[0] == 0
    assert not solution.converged


@pytest.mark.parametrize("method", ["cg", "minres", "gmres", "lsmr", "neumann"])
def test_iteration_limit_raises(method):
    with pytest.raises(ConvergenceError, match=f"solve: {method}: reached max_iterations=2; raise it"):
        solve(METHODS[method], B[:, 0], method=method, max_iterations=2)


def test_neumann_with_a_long_step_raises():
    with pytest.raises(ConvergenceError, match=r"solve: neumann: diverged with step_size=3; lower it"):
        solve(POSITIVE, B[:, 0], method="neumann", step_size=3.0)
    with pytest.raises(ConvergenceError, match=r"solve: neumann: diverged"):
        solve(INDEFINITE, B[:, 0], method="neumann")
    terms = []
    with pytest.warns(HodiffWarning, match="reached max_iterations=4"):
        solution = solve(
            POSITIVE,
            B[:, 0],
            method="neumann",
            step_size=0.5,
            max_iterations=4,
            throw=False,
            callback=lambda iteration, norms: terms.append(iteration),
        )
    term, total = B[:, 0], torch.zeros(N, dtype=torch.float64)
    for _ in range(4):
        total, term = total + 0.5 * term, term - 0.5 * POSITIVE @ term
    torch.testing.assert_close(solution.value, total)
    assert terms == [1, 2, 3, 4, 4]


def test_dense_method_rejects_singular_matrix():
    with pytest.raises(ConvergenceError, match=r"solve: dense: A \+ damping I is singular"):
        solve(torch.diag(torch.tensor([1.0, 0.0])), torch.ones(2), method="dense")
    torch.testing.assert_close(
        solve(torch.diag(torch.tensor([1.0, 0.0])), torch.ones(2), method="dense", damping=1.0).value,
        torch.tensor([0.5, 1.0]),
    )


def test_least_squares_matches_numpy():
    for A in (B, B.T):
        b = torch.ones(len(A), dtype=torch.float64)
        solution = solve(A, b, method="lsmr", tol=1e-10)
        expected = np.linalg.lstsq(A.numpy(), b.numpy(), rcond=None)[0]
        torch.testing.assert_close(solution.value, torch.from_numpy(expected), rtol=1e-7, atol=1e-9)
        assert solution.residual == pytest.approx(np.linalg.norm(A.numpy() @ expected - b.numpy()), abs=1e-8)
    singular = torch.diag(torch.cat([torch.ones(50), torch.zeros(50)]).double())
    assert solve(singular, B, method="lsmr").value[50:].abs().max() == 0


def test_lsmr_rejects_operator_without_transpose():
    with pytest.raises(InputError, match='solve: A: method="lsmr" multiplies with the transpose'):
        solve(Wrapped(GENERAL), B, method="lsmr")


def test_callback_and_progress_report_every_iteration(capsys):
    seen = []
    solution = solve(POSITIVE, B, callback=lambda iteration, norms: seen.append((iteration, norms)), progress=True)
    assert [iteration for iteration, _ in seen[: solution.iterations]] == list(range(1, solution.iterations + 1))
    assert len(seen[0][1]) == 3
    assert "products" in capsys.readouterr().err


def test_absolute_tolerance_stops_early():
    loose = solve(POSITIVE, B, tol=0.0, atol=0.1)
    assert ((POSITIVE @ loose.value - B).norm(dim=0) <= 0.1).all()
    assert loose.iterations < solve(POSITIVE, B).iterations


def test_numpy_arguments_are_accepted():
    solution = solve(POSITIVE.numpy(), B.numpy(), x0=np.zeros((N, 3)))
    torch.testing.assert_close(solution.value, by_numpy(POSITIVE, B), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("b", "options", "message"),
    [
        (torch.ones(29), {}, r"solve: b: expected shape \(30,\) or \(30, k\), got \(29,\)"),
        (torch.ones(30, 2, 2), {}, r"solve: b: expected a floating-point tensor \(30,\) or \(30, k\), got"),
        (torch.ones(30, dtype=torch.int64), {}, "solve: b: expected a floating-point tensor"),
        ({"weight": torch.ones(30)}, {}, "solve: b: expected a floating-point tensor"),
        (torch.ones(30, 0), {}, "solve: b: expected shape"),
        (torch.full((30,), torch.inf), {}, "solve: b: expected finite numbers"),
        (torch.ones(30), {"x0": torch.ones(29)}, "solve: x0: expected shape"),
        (torch.ones(30), {"x0": torch.ones(30, 1)}, "solve: x0: expected as many columns as b"),
        (torch.ones(30, 2), {"x0": torch.ones(30, 3)}, "solve: x0: expected as many columns as b"),
        (torch.ones(30), {"method": "lu"}, "solve: method: expected one of 'cg', 'minres'"),
        (torch.ones(30), {"damping": -0.1}, "solve: damping: expected a nonnegative"),
        (torch.ones(30), {"tol": -1}, "solve: tol: expected a nonnegative"),
        (torch.ones(30), {"atol": "small"}, "solve: atol: expected a nonnegative"),
        (torch.ones(30), {"max_iterations": 0}, "solve: max_iterations: expected an int of 1"),
        (torch.ones(30), {"restart": 5}, "solve: restart: expected None for method='cg', got int 5; it is for gmres"),
        (torch.ones(30), {"method": "gmres", "restart": 0}, "solve: restart: expected an int of 1"),
        (torch.ones(30), {"step_size": 0.1}, "solve: step_size: expected None for method='cg', got float 0.1"),
        (torch.ones(30), {"method": "neumann", "step_size": 0.0}, "solve: step_size: expected a positive"),
        (torch.ones(30), {"method": "dense", "preconditioner": torch.ones(30)}, "solve: preconditioner: expected None"),
        (torch.ones(30), {"preconditioner": torch.eye(29)}, r"solve: preconditioner|size|shape"),
        (torch.ones(30), {"preconditioner": lambda block: block[0]}, "solve: preconditioner: expected"),
        (torch.ones(30), {"preconditioner": 3.0}, "solve: preconditioner: A: expected a matrix"),
    ],
)
def test_rejects_bad_arguments(b, options, message):
    with pytest.raises(InputError, match=message):
        solve(torch.eye(30), b, **options)


def test_lsmr_rejects_damping_of_rectangular_operators():
    with pytest.raises(InputError, match="solve: damping: expected 0 for an operator that is not square"):
        solve(B, torch.ones(N), method="lsmr", damping=0.1)
