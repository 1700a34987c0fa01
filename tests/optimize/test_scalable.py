"""Scalable problems: derivatives along lines against differences of the value, known minima by several methods."""

import numpy as np
import pytest
import torch
from optimize import by_torch_func
from optimize.problems.elsewhere import SCALABLE as ELSEWHERE
from optimize.problems.scalable import PROBLEMS
from optimize.problems.settings import MINIMIZE
from scipy.differentiate import derivative
from slow_cases import slow_except, thinned_pairs

from hodiff import grad_and_hvp
from hodiff.checks import scipy_hessian
from hodiff.optimize import minimize

D = torch.float64
SMALL = ("trust-ncg", "trust-krylov", "newton-cg", "l-bfgs-b", "cg", "trust-exact")
LARGE = ("trust-ncg", "newton-cg", "l-bfgs-b")
# Numbers of unknowns with published minima.
PUBLISHED = (1_000, 2_000, 5_000)
# The sixteen problems of the DIXMAAN family differ in factors and powers.
ALIKE = {name for name in PROBLEMS if name.startswith("dixmaan")} - {"dixmaan b", "dixmaan l"}
TRIED = {*thinned_pairs(PROBLEMS, SMALL, by=3), *((name, "trust-ncg") for name in PROBLEMS if name not in ALIKE)}
THOUSANDS_OF_STEPS = {("nondquar", "l-bfgs-b"), ("dixmaan l", "l-bfgs-b")}
# A rounding error in the derivatives changes four steps by more than 1e-7, since the Hessians are ill-conditioned.
FEW_DIGITS = {"variably dimensioned": 1e-2, "discrete boundary value": 1e-3}
# From its zero start, rounding decides where the Lanczos process ends.
UNDETERMINED = ("fletchcr", "trust-krylov")
# These take more than a hundred milliseconds.
LONG = {"arwhead", "chained rosenbrock", "discrete boundary value", "extended wood", "fletchcr", "nondquar"}


@pytest.mark.parametrize("name", slow_except(PROBLEMS, lambda name: name not in ALIKE))
def test_derivatives_along_a_line_match_differences(name):
    problem = PROBLEMS[name]
    x = problem.start(problem.size(100))
    v = torch.randn(x.shape, generator=torch.Generator().manual_seed(0), dtype=D) * torch.where(x == 0, 1.0, x.abs())
    v *= x.norm().clamp(min=1) / v.norm()

    def along(t):
        return problem.value(x + float(t) * v)

    def values(points):
        return np.array([along(each).item() for each in points.ravel()]).reshape(points.shape)

    slope = derivative(values, 0.0, initial_step=0.1, maxiter=5).df
    (curvature,) = scipy_hessian(along, torch.zeros(1, dtype=D), initial_step=0.1, maxiter=5).matrix.flatten()
    gradient, product = grad_and_hvp(problem.value, x, v)
    assert (gradient @ v).item() == pytest.approx(slope, rel=0, abs=1e-8 * (gradient.norm() * v.norm()).item())
    assert (v @ product).item() == pytest.approx(curvature.item(), rel=0, abs=1e-6 * (product.norm() * v.norm()).item())


@pytest.mark.one_in(3)
@pytest.mark.parametrize("method", slow_except(SMALL, {"trust-ncg"}))
@pytest.mark.parametrize("name", slow_except(PROBLEMS, lambda name: name not in ALIKE))
def test_first_steps_match_manual_derivatives(name, method):
    """Wrong products and Hessians may also lead to the minimum, but by other steps."""
    problem = PROBLEMS[name]
    start = problem.start(problem.size(100))
    if (name, method) == UNDETERMINED:
        start = start + 0.1 * torch.randn(start.shape, generator=torch.Generator().manual_seed(0), dtype=D)
    ours = minimize(problem.value, start, method=method, options={"maxiter": 4})
    theirs = by_torch_func.minimize(problem.value, start, method, {"maxiter": 4})
    assert ours.nit == theirs.nit
    rtol = FEW_DIGITS.get(name, 1e-7)
    torch.testing.assert_close(ours.x, torch.from_numpy(theirs.x), rtol=rtol, atol=rtol / 100)


def cases():
    """Yield a third of the runs of the benchmark of the same name, which also counts ends at large sizes."""
    for name, problem in PROBLEMS.items():
        at_any_size = problem.minimum(1) is not None
        for n in {100, problem.largest} if at_any_size else {100, *PUBLISHED}:
            if problem.minimum(n) is None or (n > 100 and name in ALIKE):
                continue
            for method in SMALL if n == 100 else LARGE:
                if (name, method) not in TRIED or (n > 100 and (name, n, method) in ELSEWHERE):
                    continue
                if n > 100 and (name, method) in THOUSANDS_OF_STEPS:
                    continue
                quick = (
                    n == 100
                    and method == "trust-ncg"
                    and name not in LONG | ALIKE
                    and (name, n, method) not in ELSEWHERE
                )
                yield pytest.param(name, n, method, marks=[] if quick else pytest.mark.slow)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("name", "n", "method"), list(cases()))
def test_known_minimum_is_found(name, n, method):
    problem = PROBLEMS[name]
    start, options = problem.start(problem.size(n)), MINIMIZE[method]
    found = minimize(problem.value, start, method=method, options=options).fun
    if problem.is_solved_by(found, n):
        return
    assert problem.minimum(n) < found <= problem.value(start).item() * (1 + 1e-12)
    if (name, n, method) not in ELSEWHERE:
        theirs = by_torch_func.minimize(problem.value, start, method, options).fun
        assert not problem.is_solved_by(theirs, n)
