"""Training is stable: a relative perturbation of the weights by 1e-12 stays small for ten steps."""

import inspect

import pytest
import torch
from optim.table import TABLE, cross_entropy
from torch import nn

import hodiff.optim as ho

# Conjugate gradients and line searches stop at a tolerance, so a perturbation can change the number of iterations.
BOUNDS = {name: 1e-4 for name, case in TABLE.items() if not case.backward or name in ("LBFGS", "SSBroyden")}
# In directions without a gradient, rounding determines the eigenvectors that scale the next gradients.
BOUNDS |= {"SOAP": 0.2, "KLSOAP": 0.2, "KLShampoo": 1e-4}


def trained(case, disturbance, steps=10):
    """Train a model with more parameters than outputs in the batch, with the optimizer's defaults."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    inputs, labels = torch.randn(32, 6).double(), torch.randint(3, (32,))
    generator = torch.Generator().manual_seed(1)
    for p in model.parameters():
        p.data.mul_(1 + disturbance * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    named = case.make is ho.LayerwiseGaussNewton
    optimizer = case.make(model.named_parameters() if named else model.parameters(), **required_settings(case))
    for _ in range(steps):
        if case.pair:
            optimizer.step(lambda: (model(inputs), lambda outputs: cross_entropy(outputs, labels)))
        else:
            optimizer.step(lambda: cross_entropy(model(inputs), labels))
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def required_settings(case):
    """Return the settings without a suitable default."""
    names = inspect.signature(case.make).parameters
    kind = getattr(case.make, "func", case.make)
    if kind is ho.SAM:
        return {"lr": 0.05}
    if kind is ho.SSBroyden:
        return {"max_iter": 2}
    # Undamped Newton steps may converge to saddle points.
    return {"damping": 0.1} if kind is ho.NewtonCG and "damping" in names else {}


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", TABLE)
def test_perturbations_stay_small(name):
    case = TABLE[name]
    plain = trained(case, 0.0)
    grown = torch.linalg.vector_norm(trained(case, 1e-12) - plain) / torch.linalg.vector_norm(plain)
    assert grown < BOUNDS.get(name, 1e-9)
    assert torch.linalg.vector_norm(plain) < 100 * torch.linalg.vector_norm(trained(case, 0.0, 0))
