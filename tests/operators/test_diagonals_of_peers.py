"""Tests of exact diagonals and per-sample norms against BackPACK and curvlinops, if they are installed."""

from collections.abc import Callable

import pytest
import torch
from operators.cases import close
from torch import Tensor, nn

import hodiff
from hodiff import per_sample

MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3)), (6, 5)),
    "images": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1, stride=2), nn.Sigmoid(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 3)
        ),
        (6, 2, 8, 8),
    ),
}
LOSSES: dict[str, tuple[type[nn.Module], Callable[[], Tensor]]] = {
    "classes": (nn.CrossEntropyLoss, lambda: torch.randint(3, (6,))),
    "squares": (nn.MSELoss, lambda: torch.randn(6, 3).double()),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Full backward hook:UserWarning")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("loss", LOSSES)
def test_backpack(name: str, loss: str) -> None:
    backpack = pytest.importorskip("backpack")
    from backpack.extensions import BatchL2Grad, DiagGGNExact

    torch.manual_seed(0)
    make, shape = MODELS[name]
    model, function, inputs, targets = (
        make().double(),
        LOSSES[loss][0](),
        torch.randn(shape).double(),
        LOSSES[loss][1](),
    )
    problem = model, LOSSES[loss][0](), {n: p.detach() for n, p in model.named_parameters()}, inputs, targets
    ours = hodiff.GaussNewtonOperator(*problem).diagonal(exact=True).value, per_sample.norms(*problem)
    extended, function = backpack.extend(model), backpack.extend(function)
    with backpack.backpack(DiagGGNExact(), BatchL2Grad()):
        function(extended(inputs), targets).backward()
    parameters = list(extended.parameters())
    close(ours[0], torch.cat([p.diag_ggn_exact.flatten() for p in parameters]))
    # BackPACK's gradients are those of the examples' shares of the mean.
    close(ours[1], 6 * torch.stack([p.batch_l2 for p in parameters]).sum(0).sqrt())


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("loss", LOSSES)
def test_curvlinops(name: str, loss: str) -> None:
    curvlinops = pytest.importorskip("curvlinops")
    torch.manual_seed(0)
    make, shape = MODELS[name]
    model, function, inputs, targets = (
        make().double(),
        LOSSES[loss][0](),
        torch.randn(shape).double(),
        LOSSES[loss][1](),
    )
    A = hodiff.GaussNewtonOperator(model, function, dict(model.named_parameters()), inputs, targets)
    B = curvlinops.GGNLinearOperator(model, function, list(model.parameters()), [(inputs, targets)])
    close(A.diagonal(exact=True).value, (B @ torch.eye(A.shape[0]).double()).diagonal())
