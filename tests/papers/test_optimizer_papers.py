"""Tests of reproductions of optimizers: their problems against independent references, and quick runs."""

import itertools
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

Quick = Callable[[str], Any]
Script = Callable[[str], ModuleType]


def test_urban_residuals_match_nested_derivatives(script: Script) -> None:
    urban = script("urban-2025")
    for name in urban.PROBLEMS:
        problem = urban.Informed(name, width=4, count=20, seed=0)
        layers = list(problem.start.values())

        def u(points: torch.Tensor, problem: Any = problem, layers: Any = layers) -> torch.Tensor:
            h = torch.tanh(points @ layers[0].T + layers[1])
            raw = (torch.tanh(h @ layers[2].T + layers[3]) @ layers[4].T + layers[5]).squeeze(-1)
            return problem.problem.boundary(points) + problem.problem.inside(points) * raw

        def single(point: torch.Tensor, u: Any = u) -> torch.Tensor:
            return u(point[None])[0]

        slopes = torch.func.vmap(torch.func.grad(single))(problem.points)
        curvatures = torch.func.vmap(torch.func.hessian(single))(problem.points)
        for axis, jet in enumerate(problem.jets(problem.start)):
            torch.testing.assert_close(jet.value, u(problem.points))
            torch.testing.assert_close(jet.slope, slopes[:, axis])
            torch.testing.assert_close(jet.curvature, curvatures[:, axis, axis])


@pytest.mark.parametrize("name", ["Poisson", "Burgers"])
def test_urban_solutions_solve_their_equations(script: Script, name: str) -> None:
    urban = script("urban-2025")
    problem = urban.PROBLEMS[name]
    points = torch.rand(50, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 0.6 + 0.2
    step, jets = 1e-4, []
    for axis in (0, 1):
        direction = urban.along(points, axis) * step
        below, here, above = (problem.solution(points + sign * direction) for sign in (-1, 0, 1))
        jets.append(urban.Jet(here, (above - below) / (2 * step), (above - 2 * here + below) / step**2))
    assert problem.residual(*jets, points).abs().max() < 1e-4
    if name == "Burgers":
        start = torch.tensor([[-0.5, 0.0], [0.25, 0.0]], dtype=torch.float64)
        torch.testing.assert_close(problem.solution(start), problem.boundary(start), atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", ["Poisson, 5-D", "Poisson, 10-D", "heat, 4 + 1-D"])
def test_dangel_solutions_solve_their_equations(script: Script, name: str) -> None:
    problem = script("dangel-2024-pinn-kfac").PROBLEMS[name]
    inside, edge = problem.draw(20, 40)
    assert problem.residual(problem.solution, inside, True).abs().max() < 1e-12
    # By torch's Hessians, which share no code with Taylor mode.
    hessians = torch.func.vmap(torch.func.hessian(lambda x: problem.solution(x)[0]))(inside)
    curvature = hessians.diagonal(dim1=1, dim2=2)
    if problem.diffusivity is None:
        residual = curvature.sum(1) + problem.source(inside)[:, 0]
    else:
        slopes = torch.func.vmap(torch.func.grad(lambda x: problem.solution(x)[0]))(inside)
        residual = slopes[:, 0] - problem.diffusivity * curvature[:, 1:].sum(1)
    assert residual.abs().max() < 1e-12
    first = 0 if problem.diffusivity is None else 1
    on_faces = ((edge == 0) | (edge == 1))[:, first:].any(1)
    assert (on_faces | (edge[:, 0] == 0)).all()
    assert 0.4 < on_faces.double().mean() <= 1


@pytest.mark.papers
def test_dangel_methods_lower_the_loss(quick: Quick) -> None:
    for curves in quick("dangel-2024-pinn-kfac")["data"]["runs"].values():
        assert len(curves) == 7
        # How far a method gets in the time of a quick run depends on the machine.
        assert all(min(curve["loss"]) < curve["loss"][0] for curve in curves.values())


@pytest.mark.parametrize("name", ["Poisson, 2-D", "heat, 1 + 1-D"])
def test_mueller_solutions_solve_their_equations(script: Script, name: str) -> None:
    mueller = script("mueller-2023-engd")
    informed = mueller.Informed(name, seed=0, width=4, count=6)
    solution, points = informed.problem.solution, informed.inside
    assert informed.problem.residual(solution, True)(points).abs().max() < 1e-12
    # By torch's derivatives of the network, which share no code with Taylor mode.
    slopes = torch.func.vmap(torch.func.jacrev(informed.model))(points)[:, 0]
    bends = torch.func.vmap(torch.func.hessian(lambda x: informed.model(x)[0]))(points).diagonal(dim1=1, dim2=2)
    if name.startswith("Poisson"):
        expected = bends.sum(1) + 2 * math.pi**2 * torch.sin(math.pi * points).prod(1)
    else:
        expected = slopes[:, 0] - bends[:, 1] / 4
    (residual, inside), (boundary, edge) = informed.terms()
    found = torch.stack([residual(point)[0] for point in inside])
    torch.testing.assert_close(found, expected)
    at_edge = torch.stack([boundary(point)[0] for point in edge])
    torch.testing.assert_close(informed.loss(), (found.square().mean() + at_edge.square().mean()) / 2)


@pytest.mark.papers
def test_mueller_methods_lower_the_loss(quick: Quick) -> None:
    for starts in quick("mueller-2023-engd")["data"]["rows"].values():
        assert set(starts[0]) == {"ENGD", "BFGS", "Adam"}
        for rows in starts[0].values():
            losses = [row[2] for row in rows]
            assert losses[-1] < losses[0]
        engd = [row[2] for row in starts[0]["ENGD"]]
        assert engd[-1] < engd[0] / 1.3
        assert all(later <= earlier for earlier, later in itertools.pairwise(engd))


@pytest.mark.papers
def test_goldshlager_steps_are_those_of_stochastic_reconfiguration(quick: Quick) -> None:
    data = quick("goldshlager-2024-spring")["data"]
    assert data["apart"] < 1e-8
    assert set(data["errors"]) == {"SPRING", "MinSR"}
    assert -8 < data["ground states"]["lithium"]["energy"] < -7


def test_urban_five_point_scheme_matches_kronecker_matrix(script: Script) -> None:
    n = 8
    line = 2 * torch.eye(n - 1, dtype=torch.float64) - torch.eye(n - 1, dtype=torch.float64).roll(1, 0).tril()
    line -= torch.eye(n - 1, dtype=torch.float64).roll(-1, 0).triu()
    one = torch.eye(n - 1, dtype=torch.float64)
    axis = torch.arange(1, n, dtype=torch.float64) / n
    u = torch.outer(torch.sin(torch.pi * axis), torch.sin(torch.pi * axis)).flatten()
    solved = torch.linalg.solve(n**2 * (torch.kron(line, one) + torch.kron(one, line)), 2 * torch.pi**2 * u)
    assert script("urban-2025").differences(n) == pytest.approx(((solved - u).norm() / u.norm()).item(), rel=1e-9)


def test_martens_curves_are_thin_and_varied(script: Script) -> None:
    images = script("martens-2010").curves(50, 12)
    assert images.shape == (50, 144)
    assert images.min() >= 0
    assert images.max() <= 1
    assert (images > 0.5).double().mean() < 0.4
    assert images.std(0).mean() > 0.1
    assert (images.amax(1) > 0.9).all()


def test_martens_initial_weights_are_sparse(script: Script) -> None:
    network = script("martens-2010").sparse_sigmoid([40, 30, 6, 30, 40], linear=6)
    weights = [layer.weight for layer in network if isinstance(layer, torch.nn.Linear)]
    assert [int((weight != 0).sum(1).max()) for weight in weights] == [15, 15, 6, 15]
    kinds = [type(layer).__name__ for layer in network]
    assert kinds == ["Linear", "Sigmoid", "Linear", "Linear", "Sigmoid", "Linear"]


def test_language_model_is_causal(script: Script) -> None:
    language = script("liu-2023-sophia")
    text = language.Text()
    torch.manual_seed(0)
    model = language.language_model(text.vocabulary, width=8, layers=2)
    letters = text.validation[:1, :-1].clone()
    before = model(letters)
    letters[0, 20] = (letters[0, 20] + 1) % text.vocabulary
    after = model(letters)
    torch.testing.assert_close(before[:20], after[:20])
    assert (before[20:] != after[20:]).any(dim=1).all()
    inputs, targets = text.batch(3, torch.Generator().manual_seed(0))
    assert torch.equal(inputs[:, 1:], targets.view(3, -1)[:, :-1])


def test_abreu_counts_steps_to_a_loss(script: Script) -> None:
    abreu = script("abreu-2025")
    assert abreu.steps_to([3.0, 2.0, 2.5, 1.0], 2.2) == 1
    assert abreu.steps_to([3.0, 2.0], 1.0) is None


@pytest.mark.papers
def test_martens_hessian_free_beats_gradient_descent(quick: Quick) -> None:
    """Both methods use the same number of gradients, so the figures depend on the machine only by rounding."""
    best = quick("martens-2010")["data"]["best"]
    assert best["Hessian-free"] < 0.7 * best["gradient descent with momentum"]


@pytest.mark.papers
def test_urban_quasi_newton_beats_adam(quick: Quick) -> None:
    losses = quick("urban-2025")["data"]["losses"]
    for each in losses.values():
        assert each["ssbroyden"] < each["adam"] / 3
        assert each["ssbfgs"] < each["adam"] / 3


@pytest.mark.papers
def test_adahessian_and_sophia_learn(quick: Quick) -> None:
    adahessian = quick("yao-2021-adahessian")["data"]
    for run in (*adahessian["runs"]["AdaHessian"]["0.1"], *adahessian["every fifth"]):
        assert run["loss"] < math.log(10) - 0.15
        assert run["accuracy"] > 0.2
    for runs in quick("liu-2023-sophia")["data"]["runs"].values():
        for run in (each for found in runs.values() for each in found):
            assert run["losses"][-1] < run["losses"][0]


@pytest.mark.papers
def test_abreu_losses_fall_by_every_method(quick: Quick) -> None:
    for runs in quick("abreu-2025")["data"]["runs"].values():
        for losses in runs.values():
            assert losses[-1] < losses[0]
            assert losses[0] == pytest.approx(next(iter(runs.values()))[0])
