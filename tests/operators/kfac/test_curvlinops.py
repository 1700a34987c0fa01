"""Tests of K-FAC and EKFAC against curvlinops, entry by entry, if it is installed and the definitions agree.

curvlinops averages the inputs of groups of channels, while hodiff uses separate factors for each group.
"""

from itertools import product
from typing import Any

import pytest
import torch
from operators.cases import close
from torch import Tensor, nn

import hodiff

pytest.importorskip("curvlinops")

FISHERS = {"exact": "type-2", "empirical": "empirical"}


class Pooled(nn.Module):
    """A network that averages over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)).mean(1))


MODELS: dict[str, Any] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), (6, 3)),
    "tokens": (Pooled, (6, 5, 3)),
    "images": (
        lambda: nn.Sequential(nn.Conv2d(2, 3, 2, stride=2, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(27, 2)),
        (6, 2, 4, 4),
    ),
}
LOSSES: dict[str, Any] = {
    "classes": (nn.CrossEntropyLoss, lambda: torch.randint(2, (6,))),
    "squares": (nn.MSELoss, lambda: torch.randn(6, 2).double()),
    "bits": (nn.BCEWithLogitsLoss, lambda: torch.randint(2, (6, 2)).double()),
}
SETTINGS = list(product(MODELS, LOSSES, FISHERS, ["expand", "reduce"], ["joined", "separate"]))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "loss", "fisher", "sharing", "bias"), SETTINGS)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_matrix_matches_curvlinops(name: str, loss: str, fisher: str, sharing: str, bias: str, reduction: str) -> None:
    import curvlinops

    torch.manual_seed(0)
    make, shape = MODELS[name]
    model, inputs = make().double(), torch.randn(shape).double()
    function, targets = LOSSES[loss][0](reduction=reduction), LOSSES[loss][1]()
    data = [(inputs[:4], targets[:4]), (inputs[4:], targets[4:])]
    parameters = [each for each in model.parameters() if each.requires_grad]
    for ours, theirs in (
        (hodiff.KFACOperator, curvlinops.KFACLinearOperator),
        (hodiff.EKFACOperator, curvlinops.EKFACLinearOperator),
    ):
        A = ours(
            model, function, dict(model.named_parameters()), data=data, reduction=reduction, fisher=fisher,
            sharing=sharing, bias=bias,
        )  # fmt: skip
        B = theirs(
            model, function, parameters, data, fisher_type=FISHERS[fisher], kfac_approx=sharing,
            separate_weight_and_bias=bias == "separate",
        )  # fmt: skip
        expected = B @ torch.eye(A.shape[0]).double()
        if ours is hodiff.EKFACOperator and not regular(A):
            # Eigenvectors of equal eigenvalues are not unique, but the trace does not depend on them.
            assert A.trace().value == pytest.approx(float(expected.trace()), rel=1e-10)
            continue
        close(A.to_dense(), expected, 1e-10)


def regular(A: Any) -> bool:
    """Whether the eigenvalues of every factor are distinct."""
    factors = hodiff.KFACOperator._factors(A)
    spectra = [torch.linalg.eigvalsh(each) for block in factors for each in (block.A, block.B)]
    return all(bool((each.diff(dim=-1) > 1e-6 * each.max()).all()) for each in spectra)
