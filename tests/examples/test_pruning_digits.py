"""Pruning with fewer steps, and its saliencies against differences of the loss."""

import runpy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

EXAMPLE = runpy.run_path(str(Path(__file__).resolve().parents[2] / "examples" / "pruning_digits.py"))


def rows(text: str, label: str) -> list[list[float]]:
    lines = [line for line in text.splitlines() if line.startswith(label)]
    return [[float(cell) for cell in line.removeprefix(label).split()] for line in lines]


@pytest.mark.slow
def test_quick_run_prunes_better_by_saliency_than_by_magnitude(run: Callable[..., str]) -> None:
    text = run(EXAMPLE["main"], "--quick", "--no-progress")
    exact, estimated, magnitude, chance = (rows(text, f"{name} ") for name in EXAMPLE["SCORES"])
    fractions = [0, *EXAMPLE["FRACTIONS"]]
    half, most = fractions.index(0.5), fractions.index(0.8)
    for saliency in (exact, estimated):
        assert saliency[0][0] > 93
        assert saliency[0][half] > saliency[0][0] - 4
        assert saliency[0][half] > magnitude[0][half] > chance[0][half]
        assert saliency[1][half] > saliency[1][0] - 2
        assert saliency[1][most] > magnitude[1][most] + 10
    (foreseen,), (actual,) = rows(text, "foreseen "), rows(text, "actual ")
    assert foreseen == sorted(foreseen)
    assert actual == sorted(actual)


def trained() -> object:
    torch.manual_seed(0)
    images, labels = torch.rand(40, 64, dtype=torch.float64), torch.randint(10, (40,))
    each = EXAMPLE["Trained"](2, images.float(), labels, 0.01, seed=0)
    each.network.double()
    each.images = images
    each.mask = each.mask.double()
    return each


def test_saliencies_match_second_differences_of_the_loss() -> None:
    network = trained()
    weights = network.weights

    def loss(weights: torch.Tensor) -> float:
        pieces = weights.split([each.numel() for each in network.parameters.values()])
        named = zip(network.parameters.items(), pieces, strict=True)
        return network.loss({name: piece.view_as(like) for (name, like), piece in named}).item()

    found = EXAMPLE["saliency"](network)
    for index in (5, 70, 128, 131, 140, len(weights) - 1):
        step = torch.zeros_like(weights)
        step[index] = 1e-4
        second = (loss(weights + step) - 2 * loss(weights) + loss(weights - step)) / 1e-8
        assert found[index].item() == pytest.approx(second * weights[index].item() ** 2 / 2, rel=1e-4, abs=1e-9)
    # With 160 parameters, 100 products give an estimate.
    estimated = EXAMPLE["estimated_saliency"](network)
    assert 0 < (estimated - found).norm() < 0.3 * found.norm()


def test_removed_parameters_stay_zero() -> None:
    network = trained()
    scores = EXAMPLE["magnitude"](network)
    network.remove(0.25, scores)
    gone = network.weights == 0
    assert gone.sum() == 40
    assert scores[gone].max() <= scores[~gone].min()
    network.train(3, 0.01)
    assert torch.equal(network.weights == 0, gone)
    network.remove(0.5, -EXAMPLE["magnitude"](network))
    assert (network.weights == 0).sum() == 80
    assert (network.weights[gone] == 0).all()
