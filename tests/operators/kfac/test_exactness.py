"""K-FAC equals the block-diagonal Gauss-Newton matrix of another operator where theory says that it is exact."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from operators.cases import close
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hodiff


class Pooled(nn.Module):
    """A linear network that averages over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).mean(1))


class Twice(nn.Module):
    """A network that calls one layer for two places of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.layer(x[:, 0]), self.layer(x[:, 1])], dim=1)


class Checkpointed(Twice):
    """A network that calls its layer through torch's checkpoint and hodiff's."""

    def forward(self, x: Tensor) -> Tensor:
        first = checkpoint(self.layer, x[:, 0], use_reentrant=False)
        return torch.stack([first, hodiff.functions.checkpoint(self.layer, x[:, 1])], dim=1)


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(2, 3))


def tanh() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))


def labels(z: Tensor) -> Tensor:
    return torch.randint(z.shape[1], (len(z),))


SQUARES, CLASSES = (F.mse_loss, torch.randn_like), (F.cross_entropy, labels)
# Model, input shape, loss, sharing.
EXACT: dict[str, Any] = {
    "a deep linear network": (linear, (6, 3), SQUARES, "expand"),
    "a deep linear network of tokens": (linear, (3, 4, 3), SQUARES, "expand"),
    "a linear network that pools": (Pooled, (4, 3, 3), SQUARES, "reduce"),
    "one example": (tanh, (1, 3), CLASSES, "expand"),
    "one example, reduced": (tanh, (1, 3), CLASSES, "reduce"),
    "one layer called twice": (Twice, (5, 2, 3), SQUARES, "expand"),
    "one layer called twice, checkpointed": (Checkpointed, (5, 2, 3), SQUARES, "expand"),
}


def arguments(model: nn.Module, shape: tuple[int, ...], loss: Any) -> tuple[Any, ...]:
    model = model.double()
    inputs = torch.randn(shape, generator=torch.Generator().manual_seed(0)).double()
    return model, loss[0], dict(model.named_parameters()), inputs, loss[1](model(inputs).detach())


def blocks(matrix: Tensor, sizes: list[int]) -> Tensor:
    """Keep the diagonal blocks only."""
    pieces, start = [], 0
    for size in sizes:
        pieces.append(matrix[start : start + size, start : start + size])
        start += size
    return torch.block_diag(*pieces)


@pytest.mark.parametrize("name", EXACT)
def test_kfac_is_exact_where_theory_says_so(name: str) -> None:
    torch.manual_seed(0)
    make, shape, loss, sharing = EXACT[name]
    given = arguments(make(), shape, loss)
    sizes = [leaf.numel() for leaf in given[2].values()]
    G = hodiff.GaussNewtonOperator(*given).to_dense()
    of_layers = [sizes[i] + sizes[i + 1] for i in range(0, len(sizes), 2)]
    for kind in (hodiff.KFACOperator, hodiff.EKFACOperator):
        close(kind(*given, sharing=sharing).to_dense(), blocks(G, of_layers), 1e-13)
        close(kind(*given, sharing=sharing, bias="separate").to_dense(), blocks(G, sizes), 1e-13)


def test_kfac_is_inexact_with_other_settings() -> None:
    """K-FAC is not exact with the other sharing, or for a nonlinear network and many examples."""
    torch.manual_seed(0)
    for model, shape, loss, sharing in (
        (Pooled(), (4, 3, 3), SQUARES, "expand"),
        (linear(), (3, 4, 3), SQUARES, "reduce"),
        (tanh(), (6, 3), CLASSES, "expand"),
    ):
        given = arguments(model, shape, loss)
        sizes = [leaf.numel() for leaf in given[2].values()]
        G = blocks(hodiff.GaussNewtonOperator(*given).to_dense(), sizes)
        A = hodiff.KFACOperator(*given, sharing=sharing, bias="separate").to_dense()
        assert (A - G).norm() > 1e-3 * G.norm()


# The normalization layer, the last layer, and the input shape.
NORMS: dict[str, Any] = {
    "layer": (nn.LayerNorm(4), nn.Linear(4, 2), (5, 4)),
    "layer of a matrix": (nn.LayerNorm((2, 3)), nn.Linear(12, 2), (5, 2, 2, 3)),
    "root mean square": (nn.RMSNorm(3), nn.Linear(6, 2), (5, 2, 3)),
    "group": (nn.GroupNorm(2, 4), nn.Linear(8, 2), (5, 4, 2)),
    "batch": (nn.BatchNorm1d(3).eval(), nn.Linear(3, 2), (5, 3)),
    "batch of images": (nn.BatchNorm2d(2).eval(), nn.Linear(8, 2), (5, 2, 2, 2)),
    "instance": (nn.InstanceNorm1d(2, affine=True), nn.Linear(8, 2), (5, 2, 4)),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", NORMS)
def test_blocks_of_normalizations_are_exact(name: str) -> None:
    torch.manual_seed(0)
    norm, last, shape = NORMS[name]
    if "batch" in name:
        norm.running_mean.normal_()
    model = nn.Sequential(norm, nn.Tanh(), nn.Flatten(), last)
    model.train(norm.training)
    given = arguments(model, shape, CLASSES)
    x = {key: torch.rand_like(value) for key, value in given[2].items() if key.startswith("0.")}
    given = (*given[:2], x, *given[3:])
    G = hodiff.GaussNewtonOperator(*given).to_dense()
    sizes = [leaf.numel() for leaf in x.values()]
    for kind in (hodiff.KFACOperator, hodiff.EKFACOperator):
        close(kind(*given).to_dense(), G, 1e-13)
        close(kind(*given, bias="separate").to_dense(), blocks(G, sizes), 1e-13)
        close(kind(*given, norm="diagonal").to_dense(), torch.diag(G.diagonal()), 1e-13)


def test_empirical_and_probability_fisher_blocks_are_exact_for_one_example() -> None:
    """Blocks for one example match the empirical Fisher matrix and the exact Fisher matrix of probabilities."""
    torch.manual_seed(0)
    given = arguments(tanh(), (1, 3), CLASSES)
    sizes = [16, 15]
    empirical = hodiff.EmpiricalFisherOperator(*given).to_dense()
    close(hodiff.KFACOperator(*given, fisher="empirical").to_dense(), blocks(empirical, sizes), 1e-13)
    model = nn.Sequential(*given[0], nn.LogSoftmax(1))
    given = model, F.nll_loss, dict(model.named_parameters()), *given[3:]
    exact = hodiff.FisherOperator(*given).to_dense()
    close(hodiff.KFACOperator(*given).to_dense(), blocks(exact, sizes), 1e-13)
    smoothed = nn.CrossEntropyLoss(label_smoothing=0.3)
    exact = hodiff.FisherOperator(given[0], smoothed, *given[2:]).to_dense()
    close(hodiff.KFACOperator(given[0], smoothed, *given[2:]).to_dense(), blocks(exact, sizes), 1e-13)


def test_normalization_factors_of_sequences_omit_cross_terms() -> None:
    """K-FAC of a normalization's full block has no cross terms of two tokens' losses if layers mix tokens."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 4), nn.Conv1d(3, 2, 1)).double()
    inputs, y = torch.randn(3, 3, 4).double(), torch.randint(2, (3, 4))
    x = {name: value for name, value in model.named_parameters() if name.startswith("0.")}
    y[0, 1] = -100
    G = hodiff.GaussNewtonOperator(model, F.cross_entropy, x, inputs, y)
    close(hodiff.KFACOperator(model, F.cross_entropy, x, inputs, y).to_dense(), G.to_dense(), 1e-13)
    data = [(inputs[:1], y[:1]), (inputs[1:], y[1:])]
    close(hodiff.KFACOperator(model, F.cross_entropy, x, data=data).to_dense(), G.to_dense(), 1e-13)
    # A custom loss uses whole examples, and sums.
    own = lambda z, t: F.cross_entropy(z, t, reduction="sum")  # noqa: E731
    G = hodiff.GaussNewtonOperator(model, own, x, inputs, y, reduction="sum")
    close(hodiff.KFACOperator(model, own, x, inputs, y, reduction="sum").to_dense(), G.to_dense(), 1e-13)


@pytest.mark.parametrize("kind", [hodiff.KFACOperator, hodiff.EKFACOperator])
def test_monte_carlo_factors_converge_to_exact(kind: Any) -> None:
    torch.manual_seed(0)
    for loss in (CLASSES, SQUARES):
        given = arguments(tanh(), (5, 3), loss)
        exact = kind(*given).to_dense()
        errors = []
        for samples in (100, 10000):
            generator = torch.Generator().manual_seed(1)
            drawn = kind(*given, fisher="monte-carlo", samples=samples, generator=generator).to_dense()
            errors.append(float((drawn - exact).norm() / exact.norm()))
        # Ten times as accurate, as the square root of the number of samples.
        assert errors[1] < 0.03
        assert errors[1] < 0.4 * errors[0]
