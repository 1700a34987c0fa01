"""Tests of exact diagonals against the diagonal of the dense matrix, from torch.autograd's Jacobians and Hessians."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from operators.cases import MODELS, close, problem
from torch import Tensor, nn
from torch.autograd.functional import hessian, jacobian
from torch.func import functional_call

import hodiff

N, T, D = 3, 4, 6


def flat_call(model: Any, x: Any, inputs: Any) -> Callable[[Tensor], Tensor]:
    """Return the outputs as a function of flat parameters."""
    sizes = [leaf.numel() for leaf in x.values()]

    def call(flat: Tensor) -> Tensor:
        parts = flat.split(sizes)
        moved = {name: part.reshape(leaf.shape) for (name, leaf), part in zip(x.items(), parts, strict=True)}
        return functional_call(model, moved, (inputs,)) if isinstance(model, nn.Module) else model(moved, inputs)

    return call


def expected_diagonal(model: Any, loss: Any, x: Any, inputs: Any, targets: Any) -> Tensor:
    """Compute the diagonal of J^T H J from the dense Jacobian and the Hessian of the loss in the outputs."""
    flat, call = torch.cat([leaf.reshape(-1) for leaf in x.values()]), flat_call(model, x, inputs)
    z = call(flat)
    J = jacobian(call, flat).reshape(z.numel(), -1)
    H = hessian(lambda outputs: loss(outputs, targets), z).reshape(z.numel(), z.numel())
    return torch.einsum("in,ij,jn->n", J, H, J)


class Attention(nn.Module):
    """Self-attention whose input projection is no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(D, 2, batch_first=True)
        self.head = nn.Linear(D, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))


class TokensFirst(nn.Module):
    """A network whose layers see tokens in the first dimension, as many as there are examples."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(D, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x[:, :N].transpose(0, 1))).transpose(0, 1).mean(1))


class Folded(nn.Module):
    """A network that joins examples and tokens in one dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(D, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x.reshape(-1, D))).reshape(len(x), -1, 4).mean(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(D, 3, batch_first=True), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class TiedEmbedding(nn.Module):
    """A language model whose output layer is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(5, D), nn.LayerNorm(D)
        self.head = nn.Linear(D, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.position = nn.Parameter(torch.randn(T, D))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.norm(torch.tanh(self.embedding(tokens) + self.position))
        return self.head(hidden + hidden.cumsum(1)).transpose(1, 2)


class Bypassed(nn.Module):
    """A network that also reads the weight of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(D, D), nn.Linear(D, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.layer(x.mean(1)) @ self.layer.weight))


class Centered(nn.Module):
    """A network whose examples depend on each other, without batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(D, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x.mean(1)))
        return self.last(hidden - hidden.mean(0))


class Averaged(nn.Module):
    """A network that exchanges examples between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(D, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x.mean(1)) + self.first(x.mean(1)).roll(1, 0)))


class HiddenCoupling(nn.Module):
    """A network whose examples are coupled in the derivative alone."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.last = nn.Parameter(torch.randn(D)), nn.Linear(D, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(x.mean(1) * self.scale)
        return self.last(hidden + hidden.mean(0) - hidden.mean(0).detach())


def images(norm: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(
        nn.Unflatten(1, (2, 2)), nn.Conv2d(2, 4, 2, groups=2), norm(), nn.Softplus(), nn.Flatten(), nn.Linear(20, 2)
    )


def weight_normed() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.utils.parametrizations.weight_norm(nn.Linear(T * D, 3)), nn.Tanh(), nn.Linear(3, 2)
    )


HARD: dict[str, Callable[[], nn.Module]] = {
    "attention": Attention,
    "encoder": lambda: nn.Sequential(
        nn.TransformerEncoderLayer(D, 2, 5, 0.0, batch_first=True), nn.Flatten(), nn.Linear(T * D, 2)
    ),
    "tokens-first": TokensFirst,
    "folded": Folded,
    "lstm": Recurrent,
    "tied": TiedEmbedding,
    "bypassed": Bypassed,
    "centered": Centered,
    "averaged": Averaged,
    "hidden-coupling": HiddenCoupling,
    "batch-norm": images(lambda: nn.BatchNorm2d(4)),
    "group-norm": images(lambda: nn.GroupNorm(2, 4)),
    "weight-norm": weight_normed,
}


def hard_problem(name: str) -> tuple[nn.Module, Any, dict[str, Tensor], Tensor, Tensor]:
    torch.manual_seed(0)
    model = HARD[name]().double()
    inputs = torch.randint(5, (N, T)) if name == "tied" else torch.randn(N, T, D).double()
    targets = torch.randint(5, (N, T)) if name == "tied" else torch.randint(2, (N,))
    return model, F.cross_entropy, {k: p.detach() for k, p in model.named_parameters()}, inputs, targets


@pytest.mark.parametrize("name", HARD)
def test_gauss_newton_of_models_without_formulas(name: str) -> None:
    problem = hard_problem(name)
    found = hodiff.GaussNewtonOperator(*problem).diagonal(exact=True)
    close(found.value, expected_diagonal(*problem))
    assert found.method == "exact"
    assert not found.standard_error.any()


@pytest.mark.parametrize("name", ["attention", "tied", "batch-norm", "centered"])
@pytest.mark.parametrize("chunk_size", [1, 2, None])
def test_chunks_do_not_change_the_diagonal(name: str, chunk_size: int | None) -> None:
    A = hodiff.GaussNewtonOperator(*hard_problem(name))
    close(A.diagonal(exact=True, chunk_size=chunk_size).value, A.diagonal(exact=True).value)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_fishers_over_batches(name: str, reduction: str) -> None:
    p = problem(name)
    loss, options = partial(p.loss.function, reduction=reduction), {"data": p.batches(2), "reduction": reduction}
    A = hodiff.GaussNewtonOperator(p.model, p.reduced(reduction), p.x, **options)
    close(A.diagonal(exact=True).value, p.gauss_newton(reduction).diagonal())
    drawn = partial(hodiff.FisherOperator, samples=2)
    for operator in (hodiff.FisherOperator, drawn, hodiff.EmpiricalFisherOperator):
        F_ = operator(p.model, loss, p.x, **options)
        close(F_.diagonal(exact=True).value, F_.to_dense().diagonal())


def test_columns_are_fewer_than_outputs() -> None:
    p = problem("mlp")
    # The Hessian of cross-entropy of three classes has rank 2.
    assert (
        hodiff.GaussNewtonOperator(p.model, F.cross_entropy, p.x, p.inputs, p.targets).diagonal(exact=True).products
        == 2
    )


@pytest.mark.parametrize("name", MODELS)
def test_hessian(name: str) -> None:
    p = problem(name)
    for data in ([(p.inputs, p.targets)], p.batches(1, 3)):
        A = hodiff.HessianOperator(p.objective(), p.x, data=data, batch_size=lambda batch: len(batch[1]))
        close(A.diagonal(exact=True).value, p.hessian().diagonal(), 1e-11)


def test_hessian_by_another_route() -> None:
    p = problem("mlp")
    A = hodiff.HessianOperator(p.objective(), p.x, (p.inputs, p.targets), route="forward-over-reverse", chunk_size=5)
    close(A.diagonal(exact=True).value, p.hessian().diagonal())


def contrastive(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs @ outputs.mT, torch.arange(len(outputs)))


def robust(outputs: Tensor, targets: Tensor) -> Tensor:
    return (1 + (outputs - F.one_hot(targets, 2)).square().sum(1)).log().mean()


@pytest.mark.parametrize("loss", [contrastive, robust, partial(F.cross_entropy, label_smoothing=0.2)])
@pytest.mark.parametrize("name", ["attention", "centered", "folded"])
def test_losses_that_couple_examples_or_are_not_convex(loss: Any, name: str) -> None:
    model, _, x, inputs, targets = hard_problem(name)
    found = hodiff.GaussNewtonOperator(model, loss, x, inputs, 4 * targets if loss is robust else targets).diagonal
    if loss is robust:
        found = hodiff.GaussNewtonOperator(model, loss, x, inputs, targets).diagonal
    expected = expected_diagonal(model, loss, x, inputs, targets)
    close(found(exact=True).value, expected)


def test_outputs_that_are_no_single_tensor() -> None:
    model, _, x, inputs, targets = hard_problem("folded")

    def both(x: Any, inputs: Tensor) -> dict[str, Tensor]:
        outputs = functional_call(model, x, (inputs,))
        return {"logits": outputs, "norm": outputs.square().sum()}

    def loss(outputs: dict[str, Tensor], targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs["logits"], targets) + outputs["norm"].square()

    A = hodiff.GaussNewtonOperator(both, loss, x, inputs, targets)
    close(A.diagonal(exact=True).value, A.to_dense().diagonal())


@pytest.mark.parametrize("loss", [F.cross_entropy, F.mse_loss])
def test_a_single_example_without_a_dimension(loss: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    x = {name: p.detach() for name, p in model.named_parameters()}
    targets = torch.tensor(1) if loss is F.cross_entropy else torch.randn(3).double()
    problem = model, loss, x, torch.randn(3).double(), targets
    close(hodiff.GaussNewtonOperator(*problem).diagonal(exact=True).value, expected_diagonal(*problem))


@pytest.mark.parametrize("name", ["folded", "attention"])
def test_fixed_dropout_masks(name: str) -> None:
    _, loss, _, inputs, targets = hard_problem(name)
    model = nn.Sequential(nn.Dropout(0.5), HARD[name]().double())
    x = {k: p.detach() for k, p in model.named_parameters()}
    A = hodiff.GaussNewtonOperator(
        model, loss, x, data=[(inputs, targets), (inputs[:2], targets[:2])], randomness="fixed"
    )
    close(A.diagonal(exact=True).value, A.to_dense().diagonal())


def test_fixed_masks_of_outputs_that_are_no_single_tensor() -> None:
    _, _, _, inputs, targets = hard_problem("folded")
    w = torch.randn(D, 2).double()

    def model(w: Tensor, inputs: Tensor) -> list[Tensor]:
        return [F.dropout(inputs.mean(1), 0.5) @ w]

    def loss(outputs: list[Tensor], targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs[0], targets)

    A = hodiff.GaussNewtonOperator(model, loss, w, inputs, targets, randomness="fixed")
    close(A.diagonal(exact=True).value, A.to_dense().diagonal())


def test_functions_of_parameters_use_formulas_of_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    p = problem("images")

    def model(x: Any, inputs: Any) -> Any:
        return functional_call(p.model, x, (inputs,))

    from hodiff.operators.per_example import separate_gradients

    # Without the formulas, examples would be evaluated one by one.
    monkeypatch.setattr(separate_gradients.SeparateGradients, "_example", lambda *_: pytest.fail("no formula"))
    A = hodiff.GaussNewtonOperator(model, F.cross_entropy, p.x, p.inputs, p.targets)
    close(A.diagonal(exact=True).value, p.gauss_newton().diagonal())


def test_blocks_sums_and_multiples() -> None:
    p = problem("images")
    A = hodiff.GaussNewtonOperator(p.model, F.cross_entropy, p.x, p.inputs, p.targets)
    H = hodiff.HessianOperator(p.objective(), p.x, (p.inputs, p.targets))
    dense = p.gauss_newton()
    close(A.block("0").diagonal(exact=True).value, dense.diagonal()[: A.block("0").shape[0]])
    mixed = (2 * A + H).damped(0.5)
    close(mixed.diagonal(exact=True).value, 2 * dense.diagonal() + p.hessian().diagonal() + 0.5)


def test_complex_parameters() -> None:
    torch.manual_seed(0)
    w = torch.randn(3, 2, dtype=torch.complex128)
    inputs = torch.randn(4, 3, dtype=torch.complex128)
    A = hodiff.GaussNewtonOperator(
        lambda w, z: torch.view_as_real(z @ w).tanh(), F.mse_loss, w, inputs, torch.randn(4, 2, 2).double()
    )
    close(A.diagonal(exact=True).value, A.to_dense().diagonal())


def test_float32_and_bfloat16() -> None:
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 0.1)):
        model, loss, x, inputs, targets = hard_problem("encoder")
        expected = expected_diagonal(model, loss, x, inputs, targets)
        moved = {name: leaf.to(dtype) for name, leaf in x.items()}
        found = hodiff.GaussNewtonOperator(model, loss, moved, inputs.to(dtype), targets).diagonal(exact=True).value
        assert found.dtype == torch.float32
        assert (found.double() - expected).norm() < tolerance * expected.norm()


def test_refusals() -> None:
    A = hodiff.GaussNewtonOperator(*hard_problem("folded"))
    with pytest.raises(hodiff.InputError, match="method: expected only chunk_size and progress"):
        A.diagonal(exact=True, method="xdiag")
    with pytest.raises(hodiff.InputError, match="chunk_size"):
        A.diagonal(exact=True, chunk_size=0)
    with pytest.raises(hodiff.InputError, match="exact"):
        A.diagonal(exact=1)
    A.leaves[0].add_(1)
    with pytest.raises(hodiff.InputError, match="in place"):
        A.diagonal(exact=True)


def test_changed_buffer_is_no_part_of_the_operator() -> None:
    """Products keep the first linearization, and the diagonal evaluates the model again."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double().eval()
    inputs, targets = torch.randn(5, 3).double(), torch.randn(5, 4).double()
    A = hodiff.GaussNewtonOperator(model, F.mse_loss, dict(model.named_parameters()), inputs, targets)
    close(A.diagonal(exact=True).value, A.to_dense().diagonal())
    model[1].running_var.mul_(4)
    with pytest.raises(hodiff.InputError, match="expected the same value on every pass"):
        A.diagonal(exact=True)


@pytest.mark.parametrize("pair", [(0, 1), (0, 2), (2, 3), (1, 5)])
def test_any_two_coupled_examples_are_found(pair: tuple[int, int]) -> None:
    """Signs of the examples, which are equal for half of the pairs, hid their coupling."""
    torch.manual_seed(0)
    model, x = nn.Linear(3, 2).double(), torch.randn(6, 3).double()
    i, j = pair

    def loss(z: Tensor, y: Tensor) -> Tensor:
        return (z - y).square().mean() + (z[i] - z[j]).square().sum()

    problem = model, loss, dict(model.named_parameters()), x, torch.zeros(6, 2).double()
    A = hodiff.GaussNewtonOperator(*problem)
    close(A.diagonal(exact=True).value, A.to_dense().diagonal())
    with pytest.raises(hodiff.InputError, match="couples examples"):
        hodiff.KFACOperator(*problem).to_dense()
    with pytest.raises(hodiff.InputError, match="independent examples"):
        hodiff.per_sample.gradients(*problem)


@pytest.mark.slow
def test_diagonal_after_compiled_products() -> None:
    model = nn.Linear(3, 2).double()
    inputs, targets = torch.randn(5, 3).double(), torch.randn(5, 2).double()
    A = hodiff.GaussNewtonOperator(model, F.mse_loss, dict(model.named_parameters()), inputs, targets, compile=True)
    dense = A @ torch.eye(8, dtype=torch.float64)
    close(A.diagonal(exact=True).value, dense.diagonal())
