"""A mean flow's loss and gradient against primitives, its distance against a closed form, and a short run."""

import re
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from plain_attention import plain_attention

import hodiff


@pytest.mark.parametrize("through", [False, True], ids=["constant target", "through the target"])
def test_training_step_matches_primitives(example: ModuleType, through: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = example.MeanVelocity(8).double()
    images, labels = example.load_images()
    batch = example.draw_batch(images.double(), labels, 5, torch.Generator().manual_seed(0))
    parameters, u = list(model.parameters()), example.velocity(model, batch[1])
    found = example.loss(u, batch, through)
    slopes = torch.autograd.grad(found, parameters)
    monkeypatch.setattr(F, "scaled_dot_product_attention", plain_attention)
    x, _, noise, r, t = batch
    v, z = noise - x, (1 - t) * x + t * noise
    # Derivative along (v, 0, 1) by two backward passes: <w, J d> differentiated by w.
    # Corrections are needed because torch's layer norm is wrong at the next derivative.
    with hodiff.corrected():
        z, t = z.requires_grad_(), t.clone().requires_grad_()
        value = u(z, r, t)
        w = torch.zeros_like(value, requires_grad=True)
        by_z, by_t = torch.autograd.grad(value, (z, t), w, create_graph=True)
        (slope,) = torch.autograd.grad((by_z * v).sum() + by_t.sum(), w, create_graph=True)
        target = v - (t - r) * slope
        right = (value - (target if through else target.detach())).square().mean()
    torch.testing.assert_close(found, right, rtol=1e-10, atol=0)
    torch.testing.assert_close(slopes, torch.autograd.grad(right, parameters), rtol=1e-10, atol=1e-12)


def test_loss_at_equal_times_is_flow_matching(example: ModuleType) -> None:
    torch.manual_seed(0)
    model = example.MeanVelocity(8).double()
    images, labels = example.load_images()
    x, labels, noise, _, t = example.draw_batch(images.double(), labels, 5, torch.Generator().manual_seed(0))
    batch, u = (x, labels, noise, t, t), example.velocity(model, labels)
    torch.testing.assert_close(example.loss(u, batch), example.matching_loss(u, batch))


def test_mean_velocity_of_one_image_is_exact(example: ModuleType) -> None:
    """All paths to one image x are straight: the loss of u = e - x = (z - x) / t is 0, other velocities have a loss."""
    images, labels = example.load_images()
    images = images[:1].double()
    batch = example.draw_batch(images, labels[:1], 20, torch.Generator().manual_seed(0))
    assert example.loss(lambda z, r, t: (z - images) / t, batch).item() < 1e-20
    assert example.loss(lambda z, r, t: (z - images) / t + 0.1 * (t - r), batch).item() > 1e-3


def test_patches_are_reassembled(example: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = example.MeanVelocity(8, layers=0)
    model.blocks = model.patches = model.read = torch.nn.Identity()
    model.places = torch.nn.Parameter(torch.zeros(16, 4))
    for name in ("times", "labels"):
        monkeypatch.delattr(model, name)
        model.__dict__[name] = lambda given: torch.zeros(3, 4)
    z, t = torch.randn(3, 64), torch.ones(3, 1)
    torch.testing.assert_close(model(z, t, t, torch.zeros(3, dtype=torch.long)), z)


def test_distance_of_gaussians_matches_closed_form(example: ModuleType) -> None:
    """Points a and c a + b have the distance (c - 1)^2 tr S + |m - n|^2."""
    a = torch.randn(200, 6, generator=torch.Generator().manual_seed(0)).double()
    b = 1.5 * a + 0.3
    right = 0.25 * a.T.cov().trace() + (a.mean(0) - b.mean(0)).square().sum()
    assert example.frechet(a, b) == pytest.approx(right.item(), rel=1e-6)


@pytest.mark.slow
def test_short_training_lowers_the_loss(
    example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figure = tmp_path / "figures" / "mean_flow.png"
    torch.manual_seed(0)
    losses, _ = example.train(example.MeanVelocity(16), 40, 64, True, True, torch.Generator().manual_seed(0))
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    example.main(["--quick", "--output", str(figure)])
    text = capsys.readouterr().out
    assert figure.read_bytes().startswith(b"\x89PNG")
    rows = {
        name: float(distance) for name, distance in re.findall(r"^(.+?) {2,}.*?(\d+\.\d\d)\b(?!\d)", text, re.MULTILINE)
    }
    assert rows["half of the images"] < 1
    assert all(re.search(rf"^{name}, 1 step ", text, re.MULTILINE) for name in ("mean flow", "flow matching"))
