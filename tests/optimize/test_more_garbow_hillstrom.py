"""The problems of Moré, Garbow & Hillstrom: derivatives against differences, and published minima by all methods."""

import numpy as np
import pytest
import torch
from optimize import by_torch_func
from optimize.problems.elsewhere import MORE_GARBOW_HILLSTROM as ELSEWHERE
from optimize.problems.elsewhere import OWN
from optimize.problems.more_garbow_hillstrom import PROBLEMS
from optimize.problems.settings import LEAST_SQUARES, MINIMIZE, OWN_LEAST_SQUARES, OWN_MINIMIZE
from scipy.differentiate import jacobian
from slow_cases import slow_except, thinned_pairs

from hodiff import grad_and_hvp, hessian_matrix
from hodiff.checks import scipy_hessian
from hodiff.optimize import least_squares, minimize

D = torch.float64
# Differences of values around 1e12 lose all digits. By hand, the gradient is 2(x1 - 1e6) + 2 x2 (x1 x2 - 2), ...
BY_HAND = {"brown badly scaled": ([-2e6, -4e-6], [[4.0, 0.0], [0.0, 4.0]])}
# Problems that determine x to few digits, although f is accurate.
NEARLY_SINGULAR = {"watson 9", "watson 12", "linear of rank 1", "linear of rank 1 with zeros"}
QUICK = {"trf", "trust-exact", "bfgs"}


def differences(problem):
    """Compute the gradient and the Hessian at the start, in units of its elements, by SciPy's differences."""
    if problem.name in BY_HAND:
        return tuple(torch.tensor(each, dtype=D) for each in BY_HAND[problem.name])
    zero = torch.zeros_like(problem.start)
    moved = in_units(problem)

    def values(points):
        columns = torch.from_numpy(points).reshape(len(zero), -1).T
        return np.array([moved(column).item() for column in columns]).reshape(points.shape[1:])

    with np.errstate(all="ignore"):
        gradient = jacobian(values, zero.numpy(), initial_step=0.1, maxiter=3).df
    return torch.from_numpy(gradient), scipy_hessian(moved, zero, initial_step=0.1, maxiter=3).matrix


def in_units(problem):
    units = torch.where(problem.start == 0, 1.0, problem.start.abs())
    return lambda z: problem.value(problem.start + units * z)


@pytest.mark.parametrize("name", slow_except(PROBLEMS, lambda name: len(PROBLEMS[name].start) == 2))
def test_derivatives_at_the_start_match_differences(name):
    problem = PROBLEMS[name]
    gradient, hessian = differences(problem)
    zero = torch.zeros_like(problem.start)
    ours, _ = grad_and_hvp(in_units(problem), zero, zero)
    torch.testing.assert_close(ours, gradient, rtol=0, atol=1e-7 * gradient.abs().max().item())
    matrix = hessian_matrix(in_units(problem), zero)
    torch.testing.assert_close(matrix, hessian, rtol=0, atol=1e-6 * hessian.abs().max().item())


@pytest.mark.parametrize("name", PROBLEMS)
def test_published_norms_and_minima_match(name):
    problem = PROBLEMS[name]
    if problem.norm_at_start is not None:
        assert problem.residuals(problem.start).norm().item() == pytest.approx(problem.norm_at_start, rel=1e-7)
    for point in problem.minimisers:
        # The published points have four digits.
        assert problem.value(torch.tensor(point, dtype=D)).item() == pytest.approx(
            problem.minima[0], rel=1e-5, abs=1e-7
        )


def test_all_problems_are_present():
    assert len({name.rstrip(" 0123456789") for name in PROBLEMS} - {"osborne", "penalty", "linear of rank"}) + 5 == 35


@pytest.mark.one_in(3)
@pytest.mark.parametrize("method", slow_except([*LEAST_SQUARES, *MINIMIZE], {"trust-exact", "trust-krylov", "trf"}))
@pytest.mark.parametrize("name", slow_except(PROBLEMS, lambda name: len(PROBLEMS[name].start) == 2))
def test_first_steps_match_manual_derivatives(name, method):
    """Wrong Hessians may also lead to the minimum, but by other steps."""
    problem = PROBLEMS[name]
    if method in LEAST_SQUARES:
        ours = least_squares(problem.residuals, problem.start, method=method, x_scale=1.0, max_nfev=5)
        theirs = by_torch_func.least_squares(problem.residuals, problem.start, method, {"x_scale": 1.0, "max_nfev": 5})
    else:
        options = {"maxfun" if method == "tnc" else "maxiter": 4}
        ours = minimize(problem.value, problem.start, method=method, options=options)
        theirs = by_torch_func.minimize(problem.value, problem.start, method, options)
    rtol = 1e-3 if name in NEARLY_SINGULAR else 1e-6
    torch.testing.assert_close(ours.x, torch.from_numpy(theirs.x), rtol=rtol, atol=1e-9)


def value_found(problem, method, minimize, least_squares):
    if method in LEAST_SQUARES:
        return 2 * least_squares(problem.residuals, problem.start, method).cost
    return minimize(problem.value, problem.start, method).fun


def of_hodiff(problem, method):
    return value_found(
        problem,
        method,
        lambda f, x, method: minimize(f, x, method=method, options=MINIMIZE[method]),
        lambda f, x, method: least_squares(f, x, method=method, **LEAST_SQUARES[method]),
    )


def of_scipy(problem, method):
    return value_found(
        problem,
        method,
        lambda f, x, method: by_torch_func.minimize(f, x, method, MINIMIZE[method]),
        lambda f, x, method: by_torch_func.least_squares(f, x, method, LEAST_SQUARES[method]),
    )


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("name", "method"),
    [
        pytest.param(
            name,
            method,
            marks=[]
            if method in QUICK and len(PROBLEMS[name].start) < 4 and (name, method) not in ELSEWHERE
            else pytest.mark.slow,
        )
        for name, method in thinned_pairs(PROBLEMS, [*LEAST_SQUARES, *MINIMIZE], by=2)
    ],
)
def test_published_minimum_is_found(name, method):
    problem = PROBLEMS[name]
    found = of_hodiff(problem, method)
    if problem.is_solved_by(found):
        return
    assert problem.minima[0] < found <= problem.value(problem.start).item() * (1 + 1e-12)
    # The derivatives are not the cause: the method also fails with torch.func.
    assert (name, method) in ELSEWHERE or not problem.is_solved_by(of_scipy(problem, method))


@pytest.mark.parametrize(
    "case",
    slow_except(
        [(name, method) for name in PROBLEMS for method in [*OWN_LEAST_SQUARES, *OWN_MINIMIZE]],
        lambda case: case[0] in {"rosenbrock", "beale"},
        " ".join,
    ),
)
def test_published_minimum_is_found_by_own_methods(case):
    name, method = case
    problem = PROBLEMS[name]
    if method in OWN_LEAST_SQUARES:
        found = 2 * least_squares(problem.residuals, problem.start, method=method, **OWN_LEAST_SQUARES[method]).cost
    else:
        found = minimize(problem.value, problem.start, method=method, options=OWN_MINIMIZE[method]).fun
    # Rounding decides which runs do not converge, as above.
    assert problem.is_solved_by(found) or case in OWN, found
