"""A network for Poisson's equation: its right-hand side, two ways to a Laplacian, and a shorter example."""

import math
import re
import runpy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

EXAMPLE = runpy.run_path(str(Path(__file__).resolve().parents[2] / "examples" / "pinn_poisson.py"))


def test_right_hand_side_matches_closed_form() -> None:
    """The factors' second derivatives by hand: (1 - π²) f + 2 π exp(x) cos(π x), and -4 π² times the second factor."""
    points = torch.rand(7, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x, y = math.pi * points.T
    exponential, rest = points[:, 0].exp(), torch.sin(2 * y)
    right = exponential * ((1 - 5 * math.pi**2) * x.sin() + 2 * math.pi * x.cos()) * rest
    torch.testing.assert_close(EXAMPLE["source"](points), right)


def test_both_laplacians_give_one_loss() -> None:
    model = EXAMPLE["Solution"](5, torch.Generator().manual_seed(0)).double()
    points = torch.rand(7, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = EXAMPLE["loss"](model, points)
    right = (EXAMPLE["laplacian_by_gradients"](model, points) - EXAMPLE["source"](points)).square().mean()
    weights = list(model.parameters())
    torch.testing.assert_close(found, right)
    # The last bias drops out of the network's second derivatives, but not out of those of its product with the factor.
    torch.testing.assert_close(torch.autograd.grad(found, weights), torch.autograd.grad(right, weights))


@pytest.mark.slow
def test_quick_run_learns(run: Callable[..., str]) -> None:
    text = run(EXAMPLE["main"], "--quick")
    assert float(re.findall(r"relative error (\S+) after 200 steps", text)[0]) < 0.5
    assert re.findall(r"^ +(2|8) +[\d.]+ +[\d.]+$", text, re.MULTILINE) == ["2", "8"]
