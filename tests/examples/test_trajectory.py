"""A swing-up: constraints by formulas, sparse derivatives against dense, a simulation, and the whole example."""

import math
import re
import runpy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.optimize import NonlinearConstraint, minimize
from scipy.sparse import csr_array

import hodiff

EXAMPLE = runpy.run_path(str(Path(__file__).resolve().parents[2] / "examples" / "trajectory.py"))


def test_constraints_match_the_trapezoidal_rule() -> None:
    problem = EXAMPLE["SwingUp"](3, 2.0)
    z = torch.tensor([[0.1, 0.2, 0.3], [1.0, -0.4, 0.5], [3.0, 0.6, -0.7]], dtype=torch.float64)
    found = problem.constraints(z.view(-1))
    rates = [[v, u - math.sin(a) - 0.1 * v] for a, v, u in z.tolist()]
    missed = [[z[i + 1, k] - z[i, k] - (rates[i + 1][k] + rates[i][k]) / 2 for k in range(2)] for i in range(2)]
    torch.testing.assert_close(found["between"], torch.tensor(missed, dtype=torch.float64))
    assert found["first"].tolist() == [0.1, 0.2]
    assert found["last"].tolist() == [3.0 - math.pi, 0.6]
    assert problem.effort(z.view(-1)).item() == pytest.approx(0.3**2 / 2 + 0.5**2 + 0.7**2 / 2)


def test_sparse_derivatives_match_dense() -> None:
    off, seconds = EXAMPLE["compare"](12)
    assert off < 1e-13
    assert set(seconds) == {"sparse", "dense"}


def test_sparse_and_dense_derivatives_give_one_trajectory() -> None:
    problem = EXAMPLE["SwingUp"](25, 5.0)
    ways = [EXAMPLE["newton"](problem, EXAMPLE[name](problem)) for name in ("sparse", "dense")]
    torch.testing.assert_close(ways[0][0], ways[1][0], rtol=0, atol=1e-7)
    assert len(ways[0][1]) == len(ways[1][1])


@pytest.mark.slow
def test_scipy_finds_no_smaller_effort() -> None:
    """SLSQP starts near the solution, and uses gradients alone."""
    problem = EXAMPLE["SwingUp"](13, 5.0)
    z, _ = EXAMPLE["newton"](problem, EXAMPLE["sparse"](problem))

    def broken(z: np.ndarray) -> np.ndarray:
        found: np.ndarray = EXAMPLE["flat"](problem.constraints(torch.from_numpy(z))).numpy()
        return found

    def jacobian(z: np.ndarray) -> np.ndarray:
        return csr_array(EXAMPLE["sparse"](problem).jacobian(torch.from_numpy(z))).toarray()

    found = minimize(
        lambda z: problem.effort(torch.from_numpy(z)).item(),
        z.numpy() + 0.05 * np.cos(np.arange(39)),
        jac=lambda z: EXAMPLE["gradient"](problem.effort, torch.from_numpy(z)).numpy(),
        constraints=NonlinearConstraint(broken, 0, 0, jac=jacobian),
        method="SLSQP",
        options={"maxiter": 300, "ftol": 1e-12},
    )
    assert problem.effort(z).item() == pytest.approx(found.fun, rel=1e-6)


def test_simulation_error_falls_with_more_times() -> None:
    distances = []
    for knots in (61, 121):
        problem = EXAMPLE["SwingUp"](knots, 5.0)
        z, _ = EXAMPLE["newton"](problem, EXAMPLE["sparse"](problem))
        distances.append(np.linalg.norm(EXAMPLE["simulated"](problem, z) - [math.pi, 0]))
    assert distances[0] / distances[1] == pytest.approx(4, rel=0.3)


def test_unconverged_newton_raises() -> None:
    problem = EXAMPLE["SwingUp"](9)
    with pytest.raises(hodiff.ConvergenceError, match="after 2 steps"):
        EXAMPLE["newton"](problem, EXAMPLE["sparse"](problem), most=2)


@pytest.mark.slow
def test_quick_run_prints_and_saves_results(run: Callable[..., str]) -> None:
    text = run(EXAMPLE["main"], "--quick")
    off = re.findall(r"with this torque: (\S+) from upright, rate (\S+)$", text, re.MULTILINE)[0]
    assert max(abs(float(each)) for each in off) < 1e-2
