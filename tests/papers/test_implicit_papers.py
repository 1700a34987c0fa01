"""Tests of reproductions on implicit and soft functions, traces and influence: independent references, quick runs."""

import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

Quick = Callable[[str], Any]
Script = Callable[[str], ModuleType]


def test_blondel_ridge_closed_forms_match(script: Script) -> None:
    ridge = script("blondel-2022-implicit").Ridge()
    solution = torch.linalg.lstsq(
        torch.cat([ridge.X, ridge.penalties.sqrt().diag()]), torch.cat([ridge.y, torch.zeros(10, dtype=torch.float64)])
    ).solution
    torch.testing.assert_close(solution, ridge.solution)
    normal, moment = ridge.X.T @ ridge.X, ridge.X.T @ ridge.y
    J = torch.func.jacrev(lambda p: torch.linalg.solve(normal + p.diag(), moment))(ridge.penalties)
    torch.testing.assert_close(J, ridge.jacobian)
    assert ridge.least == pytest.approx(torch.linalg.eigvalsh(normal)[0].item() + 0.1)


def test_blondel_dual_hypergradient_matches_differences(script: Script) -> None:
    module = script("blondel-2022-implicit")
    problem = module.SupportVectors(10)
    found = problem.hypergradients(600)[module.IMPLICIT]().item()

    def error(penalty: float) -> float:
        p = torch.tensor(penalty, dtype=torch.float64)
        weights = problem.weights(problem.solve(600, p), p)
        return (problem.X_val @ weights - problem.Y_val).square().sum().item() / 2

    penalty = module.SVM_PENALTY
    assert abs(found) > 1e-2
    assert found == pytest.approx((error(penalty + 1e-5) - error(penalty - 1e-5)) / 2e-5, rel=1e-4)


def test_blondel_soft_ranks_are_ranks_at_low_temperature(script: Script) -> None:
    found = script("blondel-2020-sorting").by_scipy(np.array([0.3, -1.0, 2.0, 0.7]), 0.01)
    assert found == pytest.approx([2, 1, 4, 3], abs=1e-6)


def test_meyer_power_law_and_graph_are_as_described(script: Script) -> None:
    meyer = script("meyer-2021-hutchpp")
    generator = torch.Generator().manual_seed(0)
    values = torch.linalg.eigvalsh(meyer.power_law(20, 1.5, generator)).flip(0)
    torch.testing.assert_close(values, torch.arange(1, 21, dtype=torch.float64) ** -1.5)
    A = meyer.graph(60, generator)
    assert torch.equal(A, A.T)
    assert A.diagonal().sum() == 0
    torch.testing.assert_close(
        meyer.exponential(A), torch.linalg.matrix_exp(A) / math.exp(torch.linalg.eigvalsh(A)[-1].item())
    )
    curve = [[0.0, 3 * m**-0.7, 1.0] for m in (10, 20, 40)]
    assert meyer.rate([10, 20, 40], curve) == pytest.approx(-0.7)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("hidden", [0, 5])
def test_lorraine_series_converges_to_the_validation_gradient(script: Script, hidden: int) -> None:
    lorraine = script("lorraine-2020")
    problem = lorraine.make(hidden)
    assert problem.logits(problem.start(), problem.training[0]).shape == (lorraine.IMAGES, 10)
    near = lorraine.approximations(problem, [1, 20, 1000])
    assert near["cosine"] == sorted(near["cosine"])
    assert near["distance"][-1] < 0.05 < near["distance"][0]


@pytest.mark.papers
def test_blondel_errors_follow_the_solver(quick: Quick) -> None:
    data = quick("blondel-2022-implicit")["data"]
    assert max(data["over the bound"]) <= 1.001
    assert all(a > 2 * b for a, b in list(zip(data["errors"]["unrolled"], data["errors"]["implicit"], strict=True))[1:])
    assert all(each["apart"] < 1e-3 for each in data["times"])
    exact = quick("blondel-2020-sorting")["data"]["exact"]
    assert exact["SciPy"] < 1e-6
    assert exact["differences"] < 1e-6


@pytest.mark.papers
def test_meyer_gains_grow_with_the_decay(quick: Quick) -> None:
    errors = quick("meyer-2021-hutchpp")["data"]["errors"]
    gains = [errors[f"c = {c}"]["hutchinson"][-1][1] / errors[f"c = {c}"]["hutch++"][-1][1] for c in (0.5, 1.0, 2.0)]
    assert gains == sorted(gains)
    assert gains[-1] > 20


@pytest.mark.papers
def test_lorraine_memory_is_constant_and_validation_improves(quick: Quick) -> None:
    data = quick("lorraine-2020")["data"]
    MiB = data["costs"]["MiB"]
    assert MiB["series"][-1] < 1.3 * MiB["series"][0]
    assert MiB["unrolled"][-1] > 2 * MiB["unrolled"][0]
    for curve in data["training"].values():
        assert curve[-1]["loss"] < curve[0]["loss"]
        assert curve[-1]["validation"] >= curve[0]["validation"]


@pytest.mark.papers
def test_magic_predicts_retraining(quick: Quick) -> None:
    data = quick("ilyas-2025-magic")["data"]
    assert data["scores"]["through training"][0] > 0.9
    assert data["against differences"] < 1e-6


@pytest.mark.papers
def test_pyhessian_estimates_match_the_dense_hessian(quick: Quick) -> None:
    dense = quick("yao-2020-pyhessian")["data"]["dense"]
    assert dense["trace"] < 4
    assert dense["largest"] < 1e-8
