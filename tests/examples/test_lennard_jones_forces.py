"""Forces, and gradients of their loss, against attention in primitives and closed forms; a short run."""

import re
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor


def of_primitives(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor) -> Tensor:
    return (q @ k.mT / q.shape[-1] ** 0.5 + attn_mask).softmax(-1) @ v


def atoms(example: ModuleType, count: int) -> tuple[Tensor, ...]:
    found: tuple[Tensor, ...] = example.sample(
        example.find_minimum(2), count, torch.Generator().manual_seed(0), torch.float64
    )
    return found


def potential(example: ModuleType) -> torch.nn.Module:
    torch.manual_seed(0)
    model: torch.nn.Module = example.Potential(8, scale=3.0).double()
    return model


@pytest.mark.slow
def test_training_step_matches_primitives(example: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = potential(example), atoms(example, 4)
    parameters = list(model.parameters())
    found = example.force_loss(model, batch)
    # The last bias shifts the energy by a constant, so forces do not depend on it.
    slopes = torch.autograd.grad(found, parameters, allow_unused=True)
    monkeypatch.setattr(F, "scaled_dot_product_attention", of_primitives)
    x = batch[0].clone().requires_grad_()
    (by_x,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    right = (by_x + batch[2]).square().mean()
    expected = torch.autograd.grad(right, parameters, allow_unused=True)
    assert found.item() == pytest.approx(right.item(), rel=1e-10)
    for (name, _), slope, other in zip(model.named_parameters(), slopes, expected, strict=True):
        zero = torch.zeros(())
        distance = ((zero if slope is None else slope) - (zero if other is None else other)).abs().max().item()
        assert distance < 1e-10 * right.item(), name
    assert slopes[[name for name, _ in model.named_parameters()].index("scores.weight")].abs().max() > 1e-6


def test_true_forces_match_closed_form(example: ModuleType) -> None:
    """Two atoms at a distance d repel by 48 d^-13 - 24 d^-7; at 2^(1/6) the force is 0 and the energy -1."""
    d = torch.tensor([0.9, 2 ** (1 / 6), 2.0], dtype=torch.float64)
    x = torch.zeros(3, 2, 3, dtype=torch.float64)
    x[:, 1, 0] = d
    found = example.forces(example.lennard_jones, x)
    right = torch.zeros_like(x)
    right[:, 1, 0] = 48 * d**-13 - 24 * d**-7
    right[:, 0] = -right[:, 1]
    torch.testing.assert_close(found, right, rtol=1e-10, atol=1e-10)
    assert example.lennard_jones(x)[1].item() == pytest.approx(-1)


@pytest.mark.slow
def test_minimum_matches_the_literature(example: ModuleType) -> None:
    """The minimum is the pentagonal bipyramid of Hoare and Pal (1971)."""
    assert example.lennard_jones(example.find_minimum(8)).item() == pytest.approx(-16.505384, abs=1e-6)


def test_energy_is_invariant_under_permutation_rotation_and_shift(example: ModuleType) -> None:
    model, (x, _, _) = potential(example), atoms(example, 4)
    generator = torch.Generator().manual_seed(0)
    turn = torch.linalg.qr(torch.randn(3, 3, generator=generator, dtype=torch.float64)).Q
    order = torch.randperm(x.shape[1], generator=generator)
    torch.testing.assert_close(model(x[:, order] @ turn + 0.7), model(x), rtol=1e-10, atol=1e-10)
    found, moved = example.forces(model, x), example.forces(model, x[:, order] @ turn + 0.7)
    torch.testing.assert_close(moved, found[:, order] @ turn, rtol=1e-9, atol=1e-9)
    assert (model(1.05 * x) - model(x)).abs().min() > 1e-6


@pytest.mark.slow
def test_quick_run_prints_and_saves_results(example: ModuleType, run: Callable[..., str]) -> None:
    text = run(example.main, "--quick")
    rows = [[float(each) for each in row] for row in re.findall(r"^ +(\d+) +([\d.]+) +([\d.]+)$", text, re.MULTILINE)]
    assert [rows[0][0], rows[-1][0]] == [0, 150]
    assert rows[-1][2] < 0.5 * rows[0][2]
    assert rows[-1][2] < 0.6 * rows[-1][1]
    assert "minimum -16.505384" in text
