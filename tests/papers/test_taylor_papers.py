"""Tests of reproductions on Taylor mode: all methods agree with nested derivatives of primitives, and quick runs."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

Quick = Callable[[str], Any]
Script = Callable[[str], ModuleType]


def test_dangel_all_methods_agree(script: Script) -> None:
    dangel = script("dangel-2025-collapsed")
    for operator in dangel.DIMENSIONS:
        assert dangel.error(operator, (6, 5)) < 1e-10


def test_dangel_nested_methods_match_derivatives(script: Script) -> None:
    dangel = script("dangel-2025-collapsed")
    net = dangel.network(5, (4,)).double().requires_grad_(False)
    x = torch.randn(2, 5, dtype=torch.float64)
    hessians = torch.func.vmap(torch.func.hessian(lambda y: net(y)[0]))
    fourth = torch.func.vmap(torch.func.hessian(torch.func.hessian(lambda y: net(y)[0])))(x)
    v = torch.randn(3, 2, 5, dtype=torch.float64)
    nested = dangel.exact_ways(dangel.BIHARMONIC, net)[dangel.NESTED]
    torch.testing.assert_close(nested(x), torch.einsum("niijj->n", fourth))
    torch.testing.assert_close(dangel.nested(net, x, v, 2), torch.einsum("nij,vni,vnj->n", hessians(x), v, v))
    fours = torch.einsum("nijkl,vni,vnj,vnk,vnl->n", fourth, v, v, v, v)
    torch.testing.assert_close(dangel.nested(net, x, v, 4), fours)


def test_dangel_slopes_match_a_line(script: Script) -> None:
    dangel = script("dangel-2025-collapsed")
    rows = [[0.1 + 2e-3 * n, 50 + 2**20 * n, 3 * 2**20 * n] for n in (4, 8, 16)]
    found = dangel.slopes((4, 8, 16), {"a": rows})["a"]
    assert [round(each, 6) for each in found.values()] == [2.0, 1.0, 3.0]


def test_shi_source_matches_the_solution(script: Script) -> None:
    shi = script("shi-2024-stde")
    problem = shi.TwoBody(5)
    x = problem.points(4).double()
    hessians = torch.func.vmap(torch.func.hessian(lambda y: problem.solution(y[None])[0]))(x)
    laplacian = hessians.diagonal(dim1=1, dim2=2).sum(1)
    torch.testing.assert_close(problem.source(x), laplacian + torch.sin(problem.solution(x)))
    on_the_sphere = x / x.norm(dim=1, keepdim=True)
    assert problem.solution(on_the_sphere).abs().max() < 1e-12
    assert shi.Ansatz(5).double()(on_the_sphere).abs().max() < 1e-12


def test_shi_scale_factors_fit_the_exact_solution(script: Script) -> None:
    shi = script("shi-2024-stde")
    problem = shi.TwoBody(4)
    constant, linear = shi.multiples(problem)
    assert 0.01 < linear < constant < 1
    problem.solution = lambda x: (1 - x.square().sum(1)) * (2 + x[:, 0])
    constant, linear = shi.multiples(problem)
    assert linear < 1e-5 < 0.01 < constant


@pytest.mark.slow
def test_shi_estimators_are_exact_with_all_coordinates_and_unbiased_otherwise(script: Script) -> None:
    shi = script("shi-2024-stde")
    problem = shi.TwoBody(6)
    x, generator = problem.points(3).double(), torch.Generator().manual_seed(1)
    u = shi.Ansatz(6, 8).double()
    hessians = torch.func.vmap(torch.func.hessian(lambda y: u(y[None])[0]))(x)
    exact = hessians.diagonal(dim1=1, dim2=2).sum(1)
    for way in (shi.estimated, shi.by_first_order):
        torch.testing.assert_close(way(u, x, generator, 6), exact)
        draws = torch.stack([way(u, x, generator, 2).detach() for _ in range(200)])
        assert ((draws.mean(0) - exact).abs() < 5 * draws.std(0) / 200**0.5).all()
        assert (draws.std(0) > 0).all()


@pytest.mark.papers
def test_dangel_collapsing_saves_memory(quick: Quick) -> None:
    found = quick("dangel-2025-collapsed")["data"]
    assert max(found["largest relative distance"].values()) < 1e-10
    for operator, by_way in found["slopes, ms and MiB"].items():
        for cost in ("memory, differentiable", "memory, not differentiable"):
            assert 0 < by_way["collapsed"][cost] < 0.95 * by_way["standard Taylor"][cost], operator


@pytest.mark.papers
def test_shi_errors_fall_and_training_learns(quick: Quick) -> None:
    found = quick("shi-2024-stde")["data"]
    for row in found["relative errors"].values():
        assert row["error"][-1] < 0.8 * row["error"][0]
    for curve in found["training"].values():
        assert curve["error"][-1] < curve["error"][0]
