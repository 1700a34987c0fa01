"""Predicted effects of retraining: the whole example, against torch's optimizer and dense matrices."""

import re
import runpy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.func import functional_call, jacrev
from torch.nn.functional import cross_entropy

EXAMPLE = runpy.run_path(str(Path(__file__).resolve().parents[2] / "examples" / "influence_compared.py"))


@pytest.fixture(scope="module")
def training():
    sizes = ["--images", "40", "--hidden", "2", "--held-out", "3", "--epochs", "3", "--batch", "20"]
    return EXAMPLE["prepare"](EXAMPLE["parse_options"]([*sizes, "--rate", "0.2"]))


def train(training, weights: torch.Tensor) -> torch.Tensor:
    """Held-out losses after training with torch's SGD."""
    network = training.network
    start = {name: parameter.detach().clone() for name, parameter in network.named_parameters()}
    leaves = {name: parameter.clone().requires_grad_() for name, parameter in start.items()}
    optimizer = torch.optim.SGD(leaves.values(), lr=training.rate, momentum=0.9)
    for batch in training.batches:
        optimizer.zero_grad()
        losses = cross_entropy(
            functional_call(network, leaves, (training.images[batch],)), training.labels[batch], reduction="none"
        )
        (weights[batch] * losses).mean().backward()
        optimizer.step()
    images, labels = training.held_out
    return cross_entropy(functional_call(network, leaves, (images,)), labels, reduction="none").detach()


@pytest.mark.slow
def test_quick_run_predicts_retraining(run: Callable[..., str]) -> None:
    text = run(EXAMPLE["main"], "--quick")
    assert "gradcheck passes, gradgradcheck passes" in text
    scores = {}
    for name in EXAMPLE["WAYS"]:
        scores[name] = [float(each) for each in re.search(rf"^{name} +(.*)$", text, re.MULTILINE)[1].split()[:-1]]
    through = scores.pop("through training")
    assert min(through[:3]) > 0.95
    for others in scores.values():
        assert len(others) == 4
        assert others[2] < through[2]


def test_derivative_through_training_matches_differences(training) -> None:
    found = EXAMPLE["through_training"](training)
    assert found.shape == (40, 3)
    torch.testing.assert_close(training.held_out_losses(training.ones), train(training, training.ones))
    for image in (0, 17):
        step = torch.zeros(40, dtype=torch.float64)
        step[image] = 1e-4
        slope = (train(training, training.ones + step) - train(training, training.ones - step)) / 2e-4
        torch.testing.assert_close(found[image], slope, rtol=1e-6, atol=1e-9)


def test_influence_functions_match_dense_matrices(training) -> None:
    x = training.end
    images, labels = training.images, training.labels

    def gradients(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        rows = jacrev(
            lambda x: cross_entropy(functional_call(training.network, x, (images,)), labels, reduction="none")
        )
        return torch.cat([each.flatten(1) for each in rows(x).values()], dim=1)

    outputs = functional_call(training.network, x, (images,))
    J = jacrev(lambda x: functional_call(training.network, x, (images,)))(x)
    J = torch.cat([each.flatten(2) for each in J.values()], dim=2)
    p = outputs.softmax(dim=1)
    curvature = torch.diag_embed(p) - p[:, :, None] * p[:, None]
    G = torch.einsum("nci,ncd,ndj->ij", J, curvature, J) / 40
    H = torch.func.hessian(lambda flat: mean_loss(training, flat))(torch.cat([each.flatten() for each in x.values()]))
    for name, matrix in (("Gauss-Newton", G), ("Hessian", H)):
        damped = matrix + training.damping * torch.eye(len(matrix))
        expected = -gradients(images, labels) @ torch.linalg.solve(damped, gradients(*training.held_out).T) / 40
        torch.testing.assert_close(EXAMPLE["WAYS"][name](training), expected, rtol=1e-4, atol=1e-6)


def mean_loss(training, flat: torch.Tensor) -> torch.Tensor:
    parts = flat.split([each.numel() for each in training.end.values()])
    x = {name: part.view_as(each) for (name, each), part in zip(training.end.items(), parts, strict=True)}
    return cross_entropy(functional_call(training.network, x, (training.images,)), training.labels)


def test_batched_retraining_matches_single_trainings(training) -> None:
    weights = EXAMPLE["left_out"](40, 0.1, 3, torch.Generator().manual_seed(0))
    assert (weights == 0).sum(dim=1).tolist() == [4, 4, 4]
    found = EXAMPLE["train_again"](training, weights)
    expected = torch.stack([train(training, each) for each in weights]) - train(training, training.ones)
    torch.testing.assert_close(found, expected)


def test_score_is_a_rank_correlation() -> None:
    actual = torch.tensor([[1.0, 4.0], [2.0, 5.0], [3.0, 9.0]])
    assert EXAMPLE["score"](actual.exp(), actual) == pytest.approx(1)
    assert EXAMPLE["score"](torch.stack([-actual[:, 0], actual[:, 1]], dim=1), actual) == pytest.approx(0)
