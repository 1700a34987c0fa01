"""Ten learned images train a network better than ten real images do."""

import re
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import nn


@pytest.mark.slow
def test_distilled_images_train_better_than_real_ones(
    example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figure = tmp_path / "figures" / "images.png"
    example.main(["--quick", "--no-progress", "--out", str(figure)])
    rows = re.findall(r"^(.*?) +[\d.]+ +([\d.]+) ± ([\d.]+) %$", capsys.readouterr().out, re.MULTILINE)
    distilled, real, mean, everything = (float(accuracy) for _, accuracy, _ in rows)
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert distilled > real + 20
    assert distilled > mean + 5
    assert everything > real + 10  # the trainings in the comparison work


def test_batched_networks_train_as_a_module_does(example: ModuleType) -> None:
    generator = torch.Generator().manual_seed(0)
    (images, labels), _ = example.load()
    networks = example.draw_networks(2, generator)
    distilled = torch.rand(10, 64, generator=generator)
    trained = example.trained(networks, (distilled, example.CLASSES), 0.3, steps=4)
    losses = example.losses(trained, (images, labels))
    for which in range(2):
        module = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        module.load_state_dict({name: each[which] for name, each in networks.items()})
        optimizer = torch.optim.SGD(module.parameters(), lr=0.3)
        for _ in range(4):
            optimizer.zero_grad()
            F.cross_entropy(module(distilled), torch.arange(10)).backward()
            optimizer.step()
        torch.testing.assert_close(F.cross_entropy(module(images), labels), losses[which])


def test_real_and_mean_images_belong_to_their_class(example: ModuleType) -> None:
    (images, labels), (others, _) = example.load()
    chosen = example.one_of_each((images, labels), torch.Generator().manual_seed(3))
    for digit in range(10):
        own = images[labels == digit]
        assert (own == chosen[digit]).all(dim=1).any()
        torch.testing.assert_close(example.means((images, labels))[digit], own.sum(dim=0) / len(own))
    assert (len(images), len(others)) == (1000, 797)
