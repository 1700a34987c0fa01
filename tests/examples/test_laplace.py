"""Laplace's approximation: the example, the evidence in closed form, predictions against dense matrices."""

import math
import re
import runpy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import multivariate_normal
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

import hodiff

EXAMPLE = runpy.run_path(str(Path(__file__).resolve().parents[2] / "examples" / "laplace.py"))


@pytest.mark.slow
def test_run_raises_the_likelihood_and_lowers_confidence(run: Callable[..., str]) -> None:
    text = run(EXAMPLE["main"], "--images", "150", "--hidden", "16")
    one, evidence, validation = (
        [float(each) for each in re.search(rf"^{name}.{{9}}(.*)$", text, re.MULTILINE)[1].split()[-5:]]
        for name in ("one network", "p by evidence", "p by validation")
    )
    assert min(evidence[1], validation[1]) > one[1]
    assert validation[1] >= evidence[1]
    assert validation[2] < 0.7 * one[2]
    assert one[3] < validation[3] < validation[4]


def test_evidence_of_a_linear_model_matches_closed_form() -> None:
    """Laplace and K-FAC are exact for a linear network and normal targets."""
    torch.manual_seed(0)
    inputs, targets = torch.randn(12, 3, dtype=torch.float64), torch.randn(12, 1, dtype=torch.float64)
    precision = 0.7
    A = torch.cat([inputs, torch.ones(12, 1, dtype=torch.float64)], dim=1)
    w = torch.linalg.solve(A.T @ A + precision * torch.eye(4), A.T @ targets)[:, 0]
    network = nn.Linear(3, 1).double()
    fisher = hodiff.KFACOperator(
        network,
        lambda y, t: mse_loss(y, t) / 2,
        {"weight": w[None, :3], "bias": w[3:]},
        inputs,
        targets,
        batch_size=len,
    )
    log_likelihood = -((A @ w - targets[:, 0]).square().sum() / 2 + 6 * math.log(2 * math.pi)).item()
    found = EXAMPLE["log_evidence"](fisher, log_likelihood, 12, precision)
    covariance = np.eye(12) + (A @ A.T / precision).numpy()
    expected = multivariate_normal(np.zeros(12), covariance).logpdf(targets[:, 0].numpy())
    assert found == pytest.approx(expected, rel=1e-10)


def test_predictions_match_dense_matrices() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    x = {name: parameter.detach() for name, parameter in network.named_parameters()}
    inputs, labels = torch.randn(10, 3, dtype=torch.float64), torch.randint(3, (10,))
    fisher = hodiff.KFACOperator(network, cross_entropy, x, inputs, labels)
    found = EXAMPLE["Laplace"](network, fisher, 10, inputs[:2])(0.5)
    covariance = torch.linalg.inv(10 * fisher.to_dense() + 0.5 * torch.eye(31))
    for image, probabilities in zip(inputs, found, strict=False):
        logits = network(image)
        rows = [torch.cat([g.flatten() for g in torch.autograd.grad(each, [*network.parameters()], retain_graph=True)])
                for each in logits]  # fmt: skip
        variances = torch.stack([row @ covariance @ row for row in rows])
        expected = (logits / (1 + math.pi * variances / 8).sqrt()).softmax(dim=0)
        torch.testing.assert_close(probabilities, expected.detach())


def test_calibration_matches_by_hand() -> None:
    """Two images fall in the bin from 0.6, one of them right; the third is right with certainty."""
    probabilities = torch.tensor([[0.65, 0.35], [0.37, 0.63], [0.0, 1.0]], dtype=torch.float64)
    error, confidences, rights = EXAMPLE["calibration"](probabilities, torch.tensor([0, 0, 1]))
    assert error == pytest.approx((2 * abs(0.64 - 0.5) + 0) / 3)
    assert confidences.tolist() == pytest.approx([0.64, 1.0])
    assert rights.tolist() == [0.5, 1.0]
