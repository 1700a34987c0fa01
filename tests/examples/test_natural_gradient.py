"""The natural gradient with fewer steps, and its step against a dense Fisher matrix."""

import re
import runpy
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.func import functional_call, jacrev

EXAMPLE = runpy.run_path(str(Path(__file__).resolve().parents[2] / "examples" / "natural_gradient.py"))


@pytest.mark.slow
def test_quick_run_reaches_a_lower_loss_than_gradient_descent(capsys: pytest.CaptureFixture[str]) -> None:
    EXAMPLE["main"](["--quick", "--no-progress"])
    text = capsys.readouterr().out
    natural, descent = map(float, re.search(r"same steps: .* (\S+), gradient descent (\S+)$", text, re.M).groups())
    assert natural < 0.1 * descent
    rows = re.findall(r"^gradient descent, rate [\d.]+ +25 +\S+ +(\S+)", text, re.MULTILINE)
    assert descent == pytest.approx(min(map(float, rows)), rel=1e-2)
    steps = re.search(r"as long +([\d,]+)", text)[1]
    assert int(steps.replace(",", "")) > 25
    assert "in the same time" in text


def test_step_matches_the_dense_fisher_matrix() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    parameters = {name: parameter.detach() for name, parameter in network.named_parameters()}
    inputs, labels = torch.randn(20, 3, dtype=torch.float64), torch.randint(3, (20,))
    damping = 0.1
    step = EXAMPLE["natural_gradient"](damping)(network, parameters, inputs, labels)

    def log_probabilities(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        return functional_call(network, parameters, (inputs,)).log_softmax(dim=1)

    # By definition, the Fisher matrix is the expectation over labels of the score's outer product.
    jacobians = jacrev(log_probabilities)(parameters)
    scores = torch.cat([each.flatten(2) for each in jacobians.values()], dim=2)
    fisher = torch.einsum("nc,nci,ncj->ij", log_probabilities(parameters).exp(), scores, scores) / 20
    gradient = -scores[torch.arange(20), labels].mean(dim=0)
    found = torch.cat([each.flatten() for each in step.values()])
    residual = fisher @ found + damping * found - gradient
    assert residual.norm() <= 1.01e-2 * gradient.norm()
    assert (found - gradient / damping).norm() > 0.1 * found.norm()
