"""Tests of ignored inputs and of calls that share examples, against the used data alone and against a single call."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hodiff
from hodiff.operators.kfac.moments import used_places

KINDS = [hodiff.KFACOperator, hodiff.EKFACOperator]
kinds = pytest.mark.parametrize("kind", KINDS, ids=["KFAC", "EKFAC"])
sharings = pytest.mark.parametrize("sharing", ["expand", "reduce"])


def network(outputs: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, outputs)).double()


def matrix(kind: Any, model: nn.Module, inputs: Tensor, labels: Tensor, **options: Any) -> Tensor:
    loss = F.cross_entropy
    return kind(model, loss, dict(model.named_parameters()), inputs, labels, **options).to_dense()


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-14)


class Tokens(nn.Module):
    """Logits (N, C, T) of a network for each token, or one row for each token."""

    def __init__(self, flat: bool):
        super().__init__()
        self.network, self.flat = network(), flat

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.network(x)
        return z.flatten(0, 1) if self.flat else z.mT


@kinds
@sharings
def test_ignored_examples_do_not_count(kind: Any, sharing: str) -> None:
    model, x, y = network(), torch.randn(7, 4, dtype=torch.float64), torch.arange(7) % 3
    y[[1, 4, 5]] = -100
    used = y >= 0
    options = {"sharing": sharing}
    close(matrix(kind, model, x, y, **options), matrix(kind, model, x[used], y[used], **options))


@pytest.mark.one_in(3)
@kinds
@sharings
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(
    ("fisher", "weights"),
    # A loss with class weights is not a likelihood.
    [("monte-carlo", None), *itertools.product(["exact", "empirical"], [None, [0.0, 2.0, 1.0]])],
)
def test_batches_without_counted_labels_do_not_count(
    kind: Any, sharing: str, reduction: str, fisher: str, weights: list[float] | None
) -> None:
    model, x, y = network(), torch.randn(7, 4, dtype=torch.float64), torch.arange(7) % 3
    uncounted = -100 if weights is None else 0
    y[[1, 4, 5]] = uncounted
    loss = nn.CrossEntropyLoss(torch.tensor(weights).double() if weights else None, reduction=reduction)
    options = {"sharing": sharing, "reduction": reduction, "fisher": fisher}

    def found(data: Any) -> Tensor:
        dense: Tensor = kind(model, loss, dict(model.named_parameters()), data=data, **options).to_dense()
        return dense

    nothing = torch.randn(2, 4, dtype=torch.float64), torch.full((2,), uncounted)
    expected = found([(x, y)])
    close(found([(x, y), nothing]), expected)
    if fisher != "monte-carlo":
        close(found([nothing, (x, y)]), expected)
        close(found([(torch.cat([x, nothing[0]]), torch.cat([y, nothing[1]]))]), expected)


@pytest.mark.parametrize("flat", [False, True], ids=["dimension", "rows"])
def test_padding_does_not_count(flat: bool) -> None:
    """A token is an example with "expand", so the used tokens alone give the same matrix."""
    x, y = torch.randn(3, 4, 4, dtype=torch.float64), torch.arange(12).reshape(3, 4) % 3
    y[0, 2:], y[2] = -100, -100
    model = Tokens(flat)
    found = matrix(hodiff.KFACOperator, model, x, y.flatten() if flat else y)
    used = y >= 0
    alone = matrix(hodiff.KFACOperator, model.network, x[used], y[used])
    close(found, alone)


def test_reduced_inputs_average_over_counted_positions() -> None:
    x, y = torch.randn(2, 3, 4, dtype=torch.float64), torch.tensor([[0, 1, -100], [2, -100, -100]])
    model = Tokens(flat=False)
    parameters = dict(model.named_parameters())
    operator = hodiff.KFACOperator(model, F.cross_entropy, parameters, x, y, sharing="reduce", bias="separate")
    means = torch.stack([x[0, :2].mean(0), x[1, 0]])
    close(operator.blocks[0].A[0], means.T @ means / 2)  # type: ignore[union-attr]


def test_ignored_positions_that_later_labels_depend_on_count() -> None:
    """An ignored position counts if a later label depends on it, here through a running sum."""

    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 5).double(), nn.Linear(5, 3).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x).cumsum(1).tanh()).mT

    torch.manual_seed(0)
    model, x = Sums(), torch.randn(2, 3, 4, dtype=torch.float64)
    y = torch.tensor([[-100, 1, -100], [2, -100, -100]])
    parameters = dict(model.named_parameters())
    operator = hodiff.KFACOperator(model, F.cross_entropy, parameters, x, y, bias="separate")
    first = torch.stack([x[0, 0], x[0, 1], x[1, 0]])
    close(operator.blocks[0].A[0], first.T @ first / 3)  # type: ignore[union-attr]
    hidden = model.first(x).cumsum(1).tanh().detach()
    second = torch.stack([hidden[0, 1], hidden[1, 0]])
    close(operator.blocks[2].A[0], second.T @ second / 2)  # type: ignore[union-attr]


@pytest.mark.parametrize("fisher", ["exact", "empirical"])
@pytest.mark.parametrize("classes_first", [False, True])
def test_examples_ignored_by_a_user_loss_do_not_count(fisher: str, classes_first: bool) -> None:
    x, targets = torch.randn(3, 4, 4, dtype=torch.float64), torch.randn(3, 4, 3, dtype=torch.float64)
    used = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]], dtype=torch.bool)

    def masked(outputs: Tensor, targets: Tensor) -> Tensor:
        outputs = outputs.mT if classes_first else outputs
        return ((outputs - targets).pow(4) * used[..., None]).sum()

    def plain(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).pow(4).sum()

    model = Tokens(flat=False) if classes_first else network()
    options: Any = {"fisher": fisher, "reduction": "sum", "bias": "separate"}
    found = hodiff.KFACOperator(model, masked, dict(model.named_parameters()), x, targets, **options)
    inner = model.network if isinstance(model, Tokens) else model
    alone = hodiff.KFACOperator(inner, plain, dict(inner.named_parameters()), x[used], targets[used], **options)
    close(found.to_dense(), alone.to_dense())


class Centred(nn.Module):
    """Outputs of each example that depend on the mean over the batch, or over a sequence's tokens."""

    def __init__(self, dim: int, flat: bool):
        super().__init__()
        self.network, self.dim, self.flat = network(), dim, flat

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.network(x)
        z = z - z.mean(self.dim, keepdim=True)
        return z.flatten(0, -2) if self.flat else z.movedim(-1, 1)


@kinds
@pytest.mark.parametrize("fisher", ["exact", "empirical", "monte-carlo"])
def test_models_that_mix_output_rows_are_rejected(kind: Any, fisher: str) -> None:
    x, y = torch.randn(2, 4, 4, dtype=torch.float64), torch.arange(8).reshape(2, 4) % 3
    for dim, flat in [(0, False), (1, True)]:
        with pytest.raises(
            hodiff.InputError, match=r"independent rows of the outputs|the 8 examples along their first"
        ):
            matrix(kind, Centred(dim, flat), x, y.flatten() if flat else y, fisher=fisher)
    matrix(kind, Centred(1, flat=False), x, y, fisher=fisher)


def test_labels_that_do_not_match_positions_count_by_example() -> None:
    pulled = torch.zeros(2, 6, dtype=torch.bool)
    ignored = torch.tensor([[True, True, True, False], [True] * 4])
    # Four labels do not match six places, so only examples without any label are left out.
    assert used_places(ignored, pulled).tolist() == [[True] * 6, [False] * 6]  # type: ignore[union-attr]
    pulled[1, 3] = True
    assert used_places(ignored, pulled).tolist()[1] == [False] * 3 + [True] + [False] * 2  # type: ignore[union-attr]
    assert used_places(torch.zeros(2, dtype=torch.bool), pulled) is None
    assert used_places(torch.ones(5, dtype=torch.bool), pulled) is None
    assert used_places(torch.ones(2, dtype=torch.bool), torch.zeros(2, 6, dtype=torch.bool)) is None


class Chunked(nn.Module):
    """A model that calls its network on successive chunks of the examples."""

    def __init__(self, model: nn.Module, sizes: list[int]):
        super().__init__()
        self.model, self.sizes = model, sizes

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.model(part) for part in x.split(self.sizes)])


@kinds
@sharings
@pytest.mark.parametrize("sizes", [[4, 4], [1, 5, 2]], ids=str)
def test_calls_on_chunks_match_one_call(kind: Any, sharing: str, sizes: list[int]) -> None:
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Conv1d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(9, 3)).double()
    x, y = torch.randn(8, 2, 4, dtype=torch.float64), torch.arange(8) % 3
    close(matrix(kind, Chunked(whole, sizes), x, y, sharing=sharing), matrix(kind, whole, x, y, sharing=sharing))


class Recurrent(nn.Module):
    """A recurrent model that returns the stacked logits of all steps, or the logits of the last step."""

    def __init__(self, every: bool):
        super().__init__()
        self.cell, self.head, self.every = nn.Linear(6, 3), nn.Linear(3, 3), every

    def forward(self, x: Tensor) -> Tensor:
        state, states = x.new_zeros(len(x), 3), []
        for step in x.unbind(1):
            state = self.cell(torch.cat([step, state], 1)).tanh()
            states.append(state)
        return torch.cat([self.head(each) for each in states]) if self.every else self.head(state)


def test_steps_of_a_recurrent_layer_share_examples() -> None:
    """EKFAC's trace with one label per example is exact only if the contributions of the steps are added."""
    torch.manual_seed(0)
    model = Recurrent(every=False).double()
    x, y = torch.randn(4, 3, 3, dtype=torch.float64), torch.arange(4) % 3
    parameters = {name: p for name, p in model.named_parameters() if "cell" in name}
    exact = hodiff.GaussNewtonOperator(model, F.cross_entropy, parameters, x, y).to_dense()
    found = hodiff.EKFACOperator(model, F.cross_entropy, parameters, x, y)
    torch.testing.assert_close(found.trace().value, float(exact.trace()), rtol=1e-10, atol=0)


def test_dependent_calls_are_not_taken_for_chunks() -> None:
    from hodiff.derivatives.bound_function import bind
    from hodiff.operators.kfac.recorded_layers import Recorded
    from hodiff.operators.linearized.model_loss import module_call

    def on_chunks(model: nn.Module, x: Tensor, layers: list[str]) -> frozenset[str]:
        point: Callable[..., Any] = module_call(model)
        function = bind("test", point, (dict(model.named_parameters()), x), name="x")
        return Recorded(function, model, layers).on_chunks

    torch.manual_seed(0)
    x = torch.randn(4, 3, 3)
    # The head's calls are chunks of the rows; the cell's calls depend on each other.
    assert on_chunks(Recurrent(every=True), x, ["cell", "head"]) == {"head"}
    assert on_chunks(Recurrent(every=False), x, ["cell", "head"]) == frozenset()
    assert on_chunks(Chunked(nn.Linear(3, 2), [1, 3]), x[:, 0], ["model"]) == {"model"}
