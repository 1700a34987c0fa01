"""Constrained minimisers: the whole example, and its numbers against other solvers and finite differences."""

import math
import re
import runpy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from sklearn.linear_model import Lasso, Ridge
from sklearn.svm import SVC

import hodiff

EXAMPLE = runpy.run_path(str(Path(__file__).resolve().parents[2] / "examples" / "constrained.py"))
PROBLEMS = (
    "ridge regression",
    "lasso",
    "support vectors, dual",
    "portfolio, equality",
    "portfolio, simplex",
)
QUICK = 40


@pytest.fixture(scope="module")
def problems() -> dict:
    return {problem.name: problem for problem in EXAMPLE["make_problems"](QUICK, 0)}


@pytest.fixture(scope="module")
def rows(problems: dict) -> dict:
    return {name: {row.quantity: row for row in EXAMPLE["compare"](problem)} for name, problem in problems.items()}


@pytest.mark.slow
def test_quick_run_prints_all_rows(capsys: pytest.CaptureFixture[str], rows: dict) -> None:
    EXAMPLE["main"](["--quick"])
    lines = capsys.readouterr().out.splitlines()
    assert "gradgradcheck passes" in lines.pop()
    assert len(lines) == 2 + 4 * len(PROBLEMS)
    for name in PROBLEMS:
        for quantity, row in rows[name].items():
            (line,) = [line for line in lines if line.startswith(f"{name:22}{quantity:22}")]
            implicit, closed = re.findall(r"-?\d+\.\d{10}", line)
            assert implicit[:-2] == closed[:-2]
            assert float(closed) == pytest.approx(row.closed.norm().item() * math.copysign(1, float(closed)), abs=1e-9)
            assert float(line.split()[-1]) <= 1e-6
            assert abs(float(closed)) > 1e-4


def test_solutions_have_active_bounds_and_kinks(problems: dict) -> None:
    """The solutions have active bounds and kinks, so that the active set matters."""
    x = {name: problem.solve(problem.at) for name, problem in problems.items()}
    for name in ("lasso", "portfolio, simplex"):
        assert 2 <= (x[name] == 0).sum() <= len(x[name]) - 2
    dual = x["support vectors, dual"]
    size = problems["support vectors, dual"].at.exp()
    assert (dual[:-1] == 0).any()
    assert (dual[:-1] == size).any()
    assert ((dual[:-1] > 0) & (dual[:-1] < size)).sum() >= 2
    assert x["portfolio, equality"].min() < 0
    for name in ("portfolio, equality", "portfolio, simplex"):
        assert x[name].sum().item() == pytest.approx(1)


def patients() -> tuple[np.ndarray, np.ndarray]:
    training, _ = EXAMPLE["load_patients"](0)
    return training.features.numpy(), training.targets.numpy()


def by_ridge(size: float) -> np.ndarray:
    features, targets = patients()
    return Ridge(alpha=size * len(targets), fit_intercept=False, solver="cholesky").fit(features, targets).coef_


def by_lasso(size: float) -> np.ndarray:
    return Lasso(alpha=size, fit_intercept=False, tol=1e-14, max_iter=100_000).fit(*patients()).coef_


def fitted_svc(size: float) -> tuple[np.ndarray, np.ndarray, SVC]:
    points, labels = (part[:QUICK] for part in patients())
    labels = np.sign(labels)
    return points, labels, SVC(kernel="linear", C=size, tol=1e-12).fit(points, labels)


def solution_by_quadratic_program(size: float) -> np.ndarray:
    """SciPy solves the dual as a quadratic program; the bias follows from a support vector of scikit-learn."""
    points, labels, found = fitted_svc(size)
    signed = labels[:, None] * points
    balance = {"type": "eq", "fun": lambda x: labels @ x, "jac": lambda x: labels}
    x = quadratic(signed @ signed.T, np.ones(QUICK), [(0, size)] * QUICK, (balance,))
    # At a support vector on the margin, the decision value is the label.
    i = next(i for i in found.support_ if 1e-3 * size < x[i] < (1 - 1e-3) * size)
    return np.append(x, labels[i] - points[i] @ (signed.T @ x))


def test_svm_bias_matches_scikit_learn(problems: dict) -> None:
    problem = problems["support vectors, dual"]
    for size in (0.02, problem.at.exp().item(), 0.1):
        *_, found = fitted_svc(size)
        x = problem.solve(torch.tensor(math.log(size), dtype=torch.float64))
        assert x[-1].item() == pytest.approx(found.intercept_.item(), abs=1e-6)
        dual = np.zeros(QUICK)
        dual[found.support_] = np.abs(found.dual_coef_[0])
        np.testing.assert_allclose(x[:-1].numpy(), dual, atol=1e-6)


def by_portfolio(bounds: list | None) -> Callable[[float], np.ndarray]:
    past = EXAMPLE["make_returns"](QUICK, 0)[0].numpy()
    total = {"type": "eq", "fun": lambda x: x.sum() - 1, "jac": np.ones_like}
    return lambda size: quadratic(size * np.cov(past, rowvar=False), past.mean(axis=0), bounds, (total,))


def quadratic(Q: np.ndarray, c: np.ndarray, bounds: list | None, constraints: tuple = ()) -> np.ndarray:
    def objective(x: np.ndarray) -> tuple[float, np.ndarray]:
        return x @ Q @ x / 2 - c @ x, Q @ x - c

    options = {"ftol": 1e-16, "maxiter": 1000}
    start = np.full(len(c), 1 / len(c))
    found = minimize(
        objective, start, jac=True, method="SLSQP", bounds=bounds, constraints=constraints, options=options
    )
    return found.x


REFERENCES = {
    "ridge regression": by_ridge,
    "lasso": by_lasso,
    "support vectors, dual": solution_by_quadratic_program,
    "portfolio, equality": by_portfolio(None),
    "portfolio, simplex": by_portfolio([(0, None)] * EXAMPLE["ASSETS"]),
}


# SciPy 1.15 warns although it stays within the bounds.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Values in x were outside bounds:RuntimeWarning")
@pytest.mark.parametrize("name", PROBLEMS)
def test_slopes_match_differences_of_other_solvers(name: str, problems: dict, rows: dict) -> None:
    """Fourth-order differences of solutions by scikit-learn and SciPy, which use no active sets of the example."""
    problem, step = problems[name], 0.02
    matrix, targets = problem.held_out.features.numpy(), problem.held_out.targets.numpy()
    x = [REFERENCES[name](math.exp(problem.at.item() + k * step)) for k in range(-2, 3)]
    losses = [np.mean((matrix @ each - targets) ** 2) / 2 for each in x]
    np.testing.assert_allclose(rows[name]["solution"].implicit.numpy(), x[2], atol=1e-6)
    slope = np.dot([1, -8, 0, 8, -1], losses) / (12 * step)
    curvature = np.dot([-1, 16, -30, 16, -1], losses) / (12 * step**2)
    derivative = np.tensordot([1, -8, 0, 8, -1], x, axes=1) / (12 * step)
    np.testing.assert_allclose(rows[name]["its derivative"].implicit.numpy(), derivative, atol=2e-4)
    assert rows[name]["slope of the loss"].implicit.item() == pytest.approx(slope, rel=1e-4, abs=1e-6)
    assert rows[name]["curvature of the loss"].implicit.item() == pytest.approx(curvature, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("wrong", [1 + 1e-5, math.nan])
def test_check_raises_on_a_gap(wrong: float) -> None:
    value = torch.tensor(2.0, dtype=torch.float64)
    right = EXAMPLE["Row"]("ridge", "slope", value, value)
    EXAMPLE["check"]([right])
    with pytest.raises(hodiff.CheckError, match="lasso, slope: a relative gap"):
        EXAMPLE["check"]([right, EXAMPLE["Row"]("lasso", "slope", value * wrong, value), right])


def test_rejects_bad_count(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        EXAMPLE["main"](["--count", "3"])
    assert "--count: expected 20 to 300" in capsys.readouterr().err
