"""Tests of the parts of the meta-learning reproductions against independent references."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch


@pytest.fixture(scope="module")
def grazzi(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("grazzi-2020-hypergradients")


@pytest.fixture(scope="module")
def finn(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("finn-2017-maml")


def test_grazzi_closed_form_matches_differences(grazzi: ModuleType) -> None:
    problem = grazzi.RidgeProblem(1)
    exact, _ = problem.exact()
    direction = torch.randn(20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    start, values = problem.penalties, []
    for sign in (1, -1):
        problem.penalties = start + sign * 1e-4 * direction
        values.append(problem.outer(problem.descended(300), problem.penalties).item())
    assert (values[0] - values[1]) / 2e-4 == pytest.approx((exact @ direction).item(), rel=1e-6)


def test_grazzi_errors_shrink_at_the_rate_of_the_inner_loop(grazzi: ModuleType) -> None:
    problem = grazzi.RidgeProblem(2)
    exact, eigenvalues = problem.exact()
    steps = [20, 40, 60, 80]
    errors = grazzi.convergence(problem, exact, steps, progress=False)
    for curve in errors.values():
        assert grazzi.rate(steps, curve) == pytest.approx(1 - grazzi.STEP_SIZE * eigenvalues[0], abs=0.02)
    for other in (grazzi.ITD, grazzi.FIXED_POINT):
        assert all(best < error for best, error in zip(errors[grazzi.CG], errors[other], strict=True))


def test_grazzi_rate_of_a_geometric_sequence_is_exact(grazzi: ModuleType) -> None:
    steps = [1, 3, 6, 10]
    assert grazzi.rate(steps, [3 * 0.7**step for step in steps]) == pytest.approx(0.7)


def test_finn_pretraining_takes_no_inner_step(finn: ModuleType) -> None:
    torch.manual_seed(0)
    learner = finn.make_learner(finn.PRETRAINED_ROW)
    x, y = torch.randn(2, 3, 4, 1)
    found = torch.autograd.grad(learner((10 * x, 10 * y, x, y)), list(learner.parameters()))
    expected = torch.autograd.grad((learner.module(x) - y).square().mean(), list(learner.parameters()))
    torch.testing.assert_close(found, expected)
    assert finn.make_learner(finn.MAML_ROW).steps == 1


@pytest.mark.parametrize(("mean", "reaches"), [(0.68, True), (0.75, True), (0.76, False), (0.3, True)])
def test_finn_reaches_reference_within_the_standard_error(finn: ModuleType, mean: float, reaches: bool) -> None:
    errors = mean + torch.tensor([0.1, -0.1]).repeat(300)
    assert finn.reaches_reference(errors) is reaches


@pytest.mark.slow
def test_finn_reports_the_number_of_meta_steps(finn: ModuleType) -> None:
    found = finn.reproduce(True, False, 5)
    assert found.settings["meta-steps"] == 5
    assert "after 5 meta-steps" in found.claims[0].measured
    assert found.claims[0].verdict == "not"
    assert found.data["meta-gradient against differences"] < 1e-6


@pytest.mark.papers
def test_rajeswaran_memory_is_constant_and_errors_are_small(quick: Callable[[str], Any]) -> None:
    data = quick("rajeswaran-2019-imaml")["data"]
    assert max(data["MiB"]["implicit"]) < 8
    assert data["MiB"]["unrolled"][-1] == pytest.approx(4 * data["MiB"]["unrolled"][-2], rel=0.3)
    assert data["MiB"]["checkpointed"][-1] < data["MiB"]["unrolled"][-1] / 3
    for name in ("unrolled", "checkpointed", "implicit"):
        assert data["errors"][name][-1] < 1e-3 < data["errors"][name][0]
    few, more = (data["errors"][f"implicit, {count} CG steps"][-1] for count in (2, 5))
    assert few > 3 * more > 3 * data["errors"]["implicit"][-1]
