"""The problems of Moré, Garbow & Hillstrom from several starts at once reach published minima."""

import pytest
import torch
from optimize.problems.elsewhere import BATCHED as ELSEWHERE
from optimize.problems.more_garbow_hillstrom import PROBLEMS
from optimize.problems.settings import BATCHED_LEAST_SQUARES, BATCHED_MINIMIZE
from slow_cases import slow_except

from hodiff.optimize import least_squares, minimize

QUICK = {"rosenbrock", "box three dimensional"}
# Factors of the standard start.
NEAR = torch.tensor([1.0, 1.001, 0.998, 1.003], dtype=torch.float64)


@pytest.mark.parametrize(
    "case",
    slow_except(
        [(name, method) for name in PROBLEMS for method in [*BATCHED_MINIMIZE, *BATCHED_LEAST_SQUARES]],
        lambda case: case[0] in QUICK and case not in ELSEWHERE,
        " ".join,
    ),
)
def test_published_minima_are_found(case):
    name, method = case
    problem = PROBLEMS[name]
    x0 = NEAR[:, None] * problem.start
    if method in BATCHED_LEAST_SQUARES:
        found = least_squares(problem.residuals, x0, batched=True, **BATCHED_LEAST_SQUARES[method])
        values = 2 * found.cost
    else:
        found = minimize(problem.value, x0, method=method, options=BATCHED_MINIMIZE[method], batched=True)
        values = found.fun
    # The returned values match f at the returned points.
    at = torch.stack([problem.value(x) for x in found.x])
    torch.testing.assert_close(values, at, rtol=1e-8, atol=1e-20)
    solved = [problem.is_solved_by(value) for value in values.tolist()]
    assert all(solved) or case in ELSEWHERE, values.tolist()
