"""K-FAC refuses unsupported models by name, and suggests a remedy."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hodiff
from hodiff import EKFACOperator, InputError, KFACOperator

INPUTS, LABELS = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 1, 0])


class Net(nn.Module):
    """A network of two layers, with a given function as its forward method."""

    def __init__(self, call: Callable[["Net", Tensor], Tensor], **layers: nn.Module):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 2)
        for name, layer in layers.items():
            self.add_module(name, layer)
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self, x)


def operator(model: nn.Module, *, kind: Any = KFACOperator, loss: Any = F.cross_entropy, **options: Any) -> Any:
    return kind(model, loss, dict(model.named_parameters()), INPUTS, LABELS, **options)


def plain(net: Net, x: Tensor) -> Tensor:
    return net.last(net.first(x).tanh())


def tied() -> nn.Module:
    net = Net(lambda net, x: net.last(net.second(net.first(x))), second=nn.Linear(3, 3))
    net.second.weight = net.first.weight
    return net


class Scaled(nn.Module):
    """A module with its own parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(3, 2), nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale


class Coupled(nn.Module):
    """A model whose outputs do not have the examples in the first dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.reshape(2, 2, 3)).reshape(4, 2)


MODELS: dict[str, tuple[Callable[[], Any], str]] = {
    "a function": (lambda: operator_of_function(), "model: expected an nn.Module"),
    "an unknown layer": (lambda: operator(Net(plain, other=nn.LSTM(3, 2))), "got 'other.weight_ih_l0' of LSTM;"),
    "a parameter of its own": (lambda: operator(Scaled()), "got 'scale' of Scaled; remove them"),
    "tied": (lambda: operator(tied()), "both first.weight and second.weight"),
    "a layer that is not called": (
        lambda: operator(Net(lambda net, x: net.last(F.linear(x, net.first.weight)))),
        "got those of 'first', which it does not call",
    ),
    "a weight that is used twice": (
        lambda: operator(Net(lambda net, x: net.last(net.first(x) + x @ net.first.weight))),
        "got those of 'first', whose gradient does not match",
    ),
    "no graph": (
        lambda: operator(Net(lambda net, x: net.last(torch.no_grad()(net.first)(x)))),
        "got 'first', called without",
    ),
    "batch norm": (
        lambda: operator(Net(lambda net, x: net.last(net.norm(x)), norm=nn.BatchNorm1d(3))),
        "call model.eval()",
    ),
    "dropout": (
        lambda: operator(nn.Sequential(nn.Linear(3, 2), nn.Dropout())),
        r"The cause are random numbers of Dropout",
    ),
    "max_norm": (
        lambda: operator(nn.Embedding(3, 2, max_norm=1.0)),
        "got 'weight' with max_norm; set scale_grad_by_freq=False and max_norm=None, or remove it from x.",
    ),
    "scale_grad_by_freq": (
        lambda: operator(nn.Embedding(3, 2, scale_grad_by_freq=True), kind=EKFACOperator),
        "got 'weight' with scale_grad_by_freq; set scale_grad_by_freq=False and",
    ),
    "several outputs": (
        lambda: operator(Net(lambda net, x: (net.first(x), plain(net, x)))),
        "expected one real tensor with examples along its first dimension",
    ),
    "examples elsewhere": (lambda: operator(Coupled(), kind=EKFACOperator), "with the 4 examples along their first"),
    "examples elsewhere, reduced": (
        lambda: operator(Coupled(), sharing="reduce"),
        "with the 4 examples along their first",
    ),
    "a layer of single rows": (
        lambda: operator(Net(lambda net, x: net.last(torch.stack([net.first(row) for row in x])))),
        "inputs with one or more examples along their first dimension, got (3,) float32 for 'first'",
    ),
    "a layer of no rows": (
        lambda: operator(Net(lambda net, x: plain(net, x) + net.second(x[:0]).sum(), second=nn.Linear(3, 1))),
        "got (0, 3) float32 for 'second'; call it on all examples together",
    ),
    "a norm of one example": (
        lambda: operator(Net(lambda net, x: plain(net, net.norm(x)), norm=nn.LayerNorm((4, 3)))),
        "got (4, 3) float32 for 'norm'; call it on all examples together",
    ),
    "a layer within torch.func": (
        lambda: operator(Net(lambda net, x: torch.func.vmap(torch.func.grad(lambda row: plain(net, row)[0]))(x))),
        "got 'first', called without recording; call it outside of torch.no_grad(), of a checkpoint, and of transforms",
    ),
    "a concave loss": (
        lambda: operator(nn.Linear(3, 2), loss=lambda z, y: -z.square().mean()),
        "loss: expected a loss that is convex in the outputs",
    ),
    "a loss that couples": (
        lambda: operator(nn.Linear(3, 2), loss=lambda z, y: z.sum() ** 2),
        "whose Hessian couples examples",
    ),
    "samples of nothing": (lambda: operator(nn.Linear(3, 2), samples=3), "samples: expected None with fisher='exact'"),
    "an unknown likelihood": (
        lambda: operator(nn.Linear(3, 2), loss=lambda z, y: F.cross_entropy(z, y), fisher="monte-carlo"),
        "loss: expected a supported negative log-likelihood",
    ),
    "another reduction": (lambda: operator(nn.Linear(3, 2), reduction="sum"), "reduction: expected 'mean'"),
    "another fisher": (lambda: operator(nn.Linear(3, 2), fisher="type-2"), "fisher: expected one of 'exact'"),
    "no data": (
        lambda: KFACOperator(nn.Linear(3, 2), F.cross_entropy, {"bias": torch.ones(2)}),
        "expected either data=",
    ),
    "heuristic, corrected": (
        lambda: operator(nn.Linear(3, 2), kind=EKFACOperator).inverse("heuristic", damping=1.0),
        "expected 'exact', because the blocks' eigenvalues",
    ),
    "an option of others": (
        lambda: operator(nn.Linear(3, 2)).inverse(damping=1.0, tol=1e-3),
        "tol: expected only damping",
    ),
    "a negative damping": (lambda: operator(nn.Linear(3, 2)).inverse(damping=-1.0), "damping: expected a nonnegative"),
    "another method": (lambda: operator(nn.Linear(3, 2)).inverse("qr"), "method: expected one of"),
    "another point": (lambda: operator(nn.Linear(3, 2)).at({"bias": torch.ones(2)}), "at: x: expected the structure"),
}


def operator_of_function() -> Any:
    return KFACOperator(lambda w, x: x @ w, F.mse_loss, torch.ones(3), INPUTS, torch.ones(4))  # type: ignore[arg-type]


EXAMPLE_KINDS = {
    "EKFAC": (EKFACOperator, {}),
    "KFOC": (hodiff.operators.KFOCOperator, {}),
    "Shampoo": (hodiff.operators.ShampooOperator, {}),
    "reduce": (KFACOperator, {"sharing": "reduce"}),
}


@pytest.mark.parametrize("name", EXAMPLE_KINDS)
def test_rejects_as_many_positions_as_examples_in_the_first_dimension(name: str) -> None:
    kind, options = EXAMPLE_KINDS[name]
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(5, 5, 3, generator=generator).double(), torch.tensor([0, 1, 0, 1, 1])
    first = Net(lambda net, x: net.last(net.first(x.transpose(0, 1)).tanh().mean(0))).double()
    flipped = Net(lambda net, x: net.last(net.first(x.flip(0)).tanh().flip(0).mean(1))).double()
    second = Net(lambda net, x: net.last(net.first(x).tanh().mean(1))).double()
    A, B, C = (
        kind(net, F.cross_entropy, dict(net.named_parameters()), x, y, **options) for net in (first, flipped, second)
    )
    with pytest.raises(InputError, match="'first' for one row affects the outputs of other rows; keep examples in"):
        A.to_dense()
    # The order of the examples does not matter.
    torch.testing.assert_close(B.to_dense(), C.to_dense())


@pytest.mark.parametrize("name", MODELS)
def test_rejects_unsupported_models(name: str) -> None:
    make, message = MODELS[name]
    with pytest.raises(InputError, match=message.replace("(", r"\(").replace(")", r"\)")):
        make().to_dense()


def test_rejects_changed_parameters_before_and_after_first_use() -> None:
    model = nn.Linear(3, 2)
    A, known = operator(model), operator(model)
    known.to_dense()
    with torch.no_grad():
        model.weight.add_(1)
    for each in (A, known):
        with pytest.raises(InputError, match="changed in place"):
            each.to_dense()


def test_rejects_shuffled_data() -> None:
    class Shuffled:
        def __init__(self) -> None:
            self.walks = 0

        def __iter__(self) -> Any:
            self.walks += 1
            return iter([(INPUTS.roll(self.walks, 0), LABELS)])

    model = nn.Linear(3, 2)
    with pytest.raises(InputError, match="expected the same batches on every pass"):
        EKFACOperator(model, F.cross_entropy, dict(model.named_parameters()), data=Shuffled()).to_dense()


def test_check_false_skips_the_check_of_layer_use() -> None:
    model = Net(lambda net, x: net.last(net.first(x) + x @ net.first.weight))
    assert operator(model, check=False).to_dense().isfinite().all()
    assert hodiff.KFACOperator is KFACOperator
