"""Tests of `compile="dynamic"`: one graph for batches of any size, equal to eager products."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import hodiff
from hodiff.operators import GaussNewtonOperator, HessianOperator

pytestmark = pytest.mark.usefixtures("captured_graphs")

MODEL = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 3)).double()
X = {name: each.detach() for name, each in MODEL.named_parameters()}


def loss(x: dict[str, Tensor], batch: Any) -> Tensor:
    inputs, labels = batch
    return F.cross_entropy(functional_call(MODEL, x, (inputs,)), labels)


def summed(x: dict[str, Tensor], batch: Any) -> Tensor:
    """Compute a loss with shapes that depend on the number of rows."""
    inputs, labels = batch
    outputs = functional_call(MODEL, x, (inputs,))
    return (outputs.reshape(inputs.shape[0] * 3).reshape(-1, 3) ** 3).mean() + labels.sum() * 0.0


def divided(x: dict[str, Tensor], batch: Any) -> Tensor:
    """Divide the loss by the number of rows as a Python number, which a graph would fix."""
    return summed(x, batch) / len(batch[0])


KINDS = {
    "hessian": lambda data, **o: HessianOperator(loss, X, data=data, **o),
    "shapes": lambda data, **o: HessianOperator(summed, X, data=data, **o),
    "gauss-newton": lambda data, **o: GaussNewtonOperator(MODEL, F.cross_entropy, X, data=data, **o),
}


def batch(size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(size)
    return torch.randn(size, 5, generator=generator).double(), torch.randint(0, 3, (size,), generator=generator)


def equals_eager(kind: str, sizes: tuple[int, ...], **options: Any) -> None:
    data = [batch(size) for size in sizes]
    A, B = KINDS[kind](data, **options), KINDS[kind](data)
    for columns in (1, 3):
        V = torch.randn(A.shape[0], columns, generator=torch.Generator().manual_seed(0)).double()
        torch.testing.assert_close(A @ V, B @ V, rtol=1e-10, atol=1e-12)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", KINDS)
def test_dynamic_compiles_one_graph_for_all_sizes(kind: str, captured_graphs: list[Any]) -> None:
    equals_eager(kind, (6, 11, 2, 40, 6), compile="dynamic")
    assert len(captured_graphs) == 1


@pytest.mark.slow
def test_sizes_used_as_numbers_compile_a_graph_each(captured_graphs: list[Any]) -> None:
    A, B = (HessianOperator(divided, X, data=[batch(4), batch(7)], compile=each) for each in ("dynamic", False))
    v = torch.ones(A.shape[0]).double()
    torch.testing.assert_close(A @ v, B @ v)
    assert len(captured_graphs) == 2


@pytest.mark.slow
def test_static_compiles_a_graph_per_size(captured_graphs: list[Any]) -> None:
    equals_eager("shapes", (6, 11), compile=True)
    assert len(captured_graphs) == 4  # for a vector and for a block each


@pytest.mark.slow
def test_batch_of_one_compiles_its_own_graph(captured_graphs: list[Any]) -> None:
    equals_eager("hessian", (6, 1, 9), compile="dynamic")
    assert 1 < len(captured_graphs) <= 3


def test_branch_on_the_size_compiles_a_graph_each(captured_graphs: list[Any]) -> None:
    def by_size(x: Tensor, rows: Tensor) -> Tensor:
        return (x**3).sum() * rows.sum() if len(rows) == 4 else (x**4).sum() * rows.sum()

    x, v = torch.tensor([1.0, 2.0], dtype=torch.float64), torch.tensor([1.0, -1.0], dtype=torch.float64)
    for size, power in ((4, 3), (5, 4), (4, 3), (7, 4)):
        A = HessianOperator(by_size, x, torch.ones(size, dtype=torch.float64), compile="dynamic")
        expected = power * (power - 1) * x ** (power - 2) * v * size
        torch.testing.assert_close(A @ v, expected)


@pytest.mark.slow
def test_every_new_size_is_compared_with_eager(captured_graphs: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that is wrong from the second size on is not used there."""
    data = [batch(6), batch(11)]
    A, B = KINDS["shapes"](data[:1], compile="dynamic"), KINDS["shapes"](data[1:])
    v = torch.ones(A.shape[0]).double()
    A @ v
    wrong = KINDS["shapes"](data[1:], compile="dynamic")
    wrong._compiled = A._compiled
    (graph,) = captured_graphs
    output = graph.graph.output_node()
    with graph.graph.inserting_before(output):
        output.args = (tuple(graph.graph.call_function(torch.mul, (each, 2.0)) for each in output.args[0]),)
    graph.recompile()
    torch.testing.assert_close(wrong @ v, B @ v)
    assert len(captured_graphs) == 2


def test_rejects_unknown_compile_option() -> None:
    with pytest.raises(hodiff.InputError, match="compile: expected one of True, False, 'dynamic', got 'always'"):
        KINDS["hessian"]([batch(2)], compile="always")


@pytest.mark.slow
def test_inductor_matches_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    equals_eager("hessian", (6, 11), compile="dynamic")
