"""Sine-Gordon in many dimensions: the right-hand side by nested gradients, bias of losses, and a shorter example."""

import re
import runpy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.func import hessian, vmap

EXAMPLE = runpy.run_path(str(Path(__file__).resolve().parents[2] / "examples" / "sine_gordon_100d.py"))
D = torch.float64


def test_right_hand_side_matches_nested_hessians() -> None:
    generator = torch.Generator().manual_seed(0)
    equation = EXAMPLE["make_equation"](5, generator, D)
    x = EXAMPLE["draw_points"](6, 5, generator, D)
    bends = vmap(hessian(lambda point: equation.solution(point[None])[0]))(x).diagonal(dim1=1, dim2=2).sum(1)
    torch.testing.assert_close(equation.source(x), bends + equation.solution(x).sin())


def test_points_lie_in_the_ball_and_the_solution_vanishes_on_the_sphere() -> None:
    generator = torch.Generator().manual_seed(0)
    radii = EXAMPLE["draw_points"](4000, 7, generator, D).norm(dim=1)
    assert radii.max() < 1
    assert abs(radii.mean() - 0.5) < 0.02
    sphere = torch.nn.functional.normalize(torch.randn(3, 7, generator=generator, dtype=D))
    net = EXAMPLE["make_network"](7, 4, generator).double()
    for u in (EXAMPLE["make_equation"](7, generator, D).solution, EXAMPLE["with_boundary"](net)):
        torch.testing.assert_close(u(sphere), torch.zeros(3, dtype=D))


@pytest.mark.slow
def test_loss_with_one_draw_is_biased_and_with_two_is_not() -> None:
    """The loss at the solution itself is the bias alone."""
    equation = EXAMPLE["make_equation"](6, torch.Generator().manual_seed(0))
    bias = EXAMPLE["measure_bias"](equation, equation.solution, 3, 60, 1)
    assert bias.exact < 1e-8
    assert abs(bias.two[0]) < 4 * bias.two[1]
    assert bias.one[0] == pytest.approx(bias.variance, rel=0.15)
    assert bias.variance > 10 * bias.two[1]


@pytest.mark.slow
def test_quick_run_learns(run: Callable[..., str]) -> None:
    text = run(EXAMPLE["main"], "--quick")
    rows = re.findall(r"^(two draws|one draw) +([\d.]+) +[\d.]+$", text, re.MULTILINE)
    assert [name for name, _ in rows] == ["two draws", "one draw"]
    assert all(float(error) < 0.2 for _, error in rows)
    assert "off by the variance of a Laplacian" in text
