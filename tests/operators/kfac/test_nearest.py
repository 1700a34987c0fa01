"""Tests of Shampoo's matrix and of the nearest Kronecker products, against gradients of single examples."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from operators.cases import close
from torch import Tensor, nn

import hodiff
from hodiff.operators import KFOCOperator, ShampooOperator

# Model, inputs, labels, name of a weight, and the shape (groups, p, q) of its block.
CASES: dict[str, Any] = {
    "perceptron": (
        lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)),
        lambda: torch.randn(6, 3).double(),
        (6,),
        "0.weight",
        (1, 4, 3),
    ),
    "tokens": (
        lambda: nn.Sequential(
            nn.Linear(3, 4), nn.Tanh(), nn.Conv1d(5, 3, 1), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3)
        ),
        lambda: torch.randn(6, 5, 3).double(),
        (6,),
        "0.weight",
        (1, 4, 3),
    ),
    "groups": (
        lambda: nn.Sequential(nn.Conv1d(4, 6, 2, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(18, 3)),
        lambda: torch.randn(7, 4, 4).double(),
        (7,),
        "0.weight",
        (2, 3, 4),
    ),
    "embedding": (
        lambda: nn.Sequential(nn.Embedding(5, 3, padding_idx=1), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3)),
        lambda: torch.tensor([[0, 0, 2, 3], [4, 1, 4, 4], [3, 2, 1, 0], [0, 2, 2, 0]]),
        (4,),
        "0.weight",
        (1, 5, 3),
    ),
    "a row": (
        lambda: nn.Sequential(nn.Linear(3, 1), nn.Tanh(), nn.Linear(1, 3)),
        lambda: torch.randn(6, 3).double(),
        (6,),
        "0.weight",
        (1, 1, 3),
    ),
    "norm": (
        lambda: nn.Sequential(nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 3)),
        lambda: torch.randn(6, 4).double(),
        (6,),
        "0.weight",
        (1, 4, 1),
    ),
}


def given(name: str) -> tuple[Any, ...]:
    torch.manual_seed(0)
    make, inputs, labels, weight, shape = CASES[name]
    model = make().double()
    return (model, F.cross_entropy, {weight: model.get_parameter(weight)}, inputs(), torch.randint(3, labels)), shape


def gradients(model: nn.Module, loss: Any, x: dict[str, Tensor], inputs: Tensor, labels: Tensor) -> Tensor:
    """Return the gradients of the examples' losses, each scaled by the root of the mean's divisor, by a loop."""
    (leaf,) = x.values()
    losses = [loss(model(inputs[i : i + 1]), labels[i : i + 1]) for i in range(len(inputs))]
    return torch.stack([torch.autograd.grad(each, leaf)[0] for each in losses]) / len(inputs) ** 0.5


def root(matrix: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ torch.diag(values.clamp(min=0).sqrt()) @ vectors.mT


@pytest.mark.parametrize("name", CASES)
def test_shampoo_matches_roots_of_second_moments(name: str) -> None:
    problem, (groups, p, q) = given(name)
    G = gradients(*problem).reshape(-1, groups, p, q)
    blocks = []
    for each in G.unbind(1):
        left, right = torch.einsum("npq,nsq->ps", each, each), torch.einsum("npq,npt->qt", each, each)
        if name == "embedding":
            # Rows are inputs, whose factor is diagonal.
            left = torch.diag(left.diagonal())
        blocks.append(torch.kron(left, right) if min(p, q) == 1 else torch.kron(root(left), root(right)))
        if min(p, q) == 1:
            blocks[-1] = torch.einsum("ni,nj->ij", each.flatten(1), each.flatten(1))
    expected = torch.block_diag(*blocks)
    A = ShampooOperator(*problem)
    close(A.to_dense(), expected, 1e-7)
    close(A.inverse(damping=0.1).to_dense(), torch.linalg.inv(expected + 0.1 * torch.eye(len(expected))), 1e-7)
    (*_, x, inputs, labels) = problem
    data = [(inputs[:2], labels[:2]), (inputs[2:], labels[2:])]
    close(ShampooOperator(*problem[:2], x, data=data).to_dense(), A.to_dense(), 1e-12)
    problem = problem[0], partial(F.cross_entropy, reduction="sum"), *problem[2:]
    summed = [ShampooOperator(*problem, reduction="sum", fisher=fisher).to_dense() for fisher in ("empirical", "exact")]
    close(summed[0], len(inputs) * expected, 1e-7)
    assert (summed[1] - summed[0]).norm() > 0.1 * summed[0].norm()


def test_shampoo_bounds_the_second_moment() -> None:
    """The smaller dimension times the matrix exceeds the matrix of which it approximates the blocks."""
    problem, (_, p, q) = given("tokens")
    F = hodiff.EmpiricalFisherOperator(*problem).to_dense()
    A = ShampooOperator(*problem).to_dense()
    assert torch.linalg.eigvalsh(min(p, q) * A - F).min() > -1e-12
    assert torch.linalg.eigvalsh(0.2 * A - F).min() < 0


def nearest(block: Tensor, p: int, q: int, allowed: Tensor | None = None) -> Tensor:
    """Return the nearest Kronecker product (p, p) x (q, q), by a singular value decomposition."""
    rows = block.reshape(p, q, p, q).permute(0, 2, 1, 3).reshape(p * p, q * q)
    if allowed is not None:
        rows = rows * allowed.reshape(-1, 1)
    U, s, V = torch.linalg.svd(rows)
    return s[0] * torch.kron(U[:, 0].reshape(p, p), V[0].reshape(q, q))


@pytest.mark.parametrize("fisher", ["exact", "empirical"])
@pytest.mark.parametrize("name", CASES)
def test_nearest_products_match_a_singular_value_decomposition(name: str, fisher: str) -> None:
    problem, (groups, p, q) = given(name)
    exact = hodiff.GaussNewtonOperator if fisher == "exact" else hodiff.EmpiricalFisherOperator
    F = exact(*problem).to_dense().reshape(groups, p * q, groups, p * q)
    allowed = torch.eye(p) if name == "embedding" else None
    expected = torch.block_diag(*(nearest(F[i, :, i], p, q, allowed) for i in range(groups)))
    close(KFOCOperator(*problem, fisher=fisher, tolerance=1e-9).to_dense(), expected, 1e-7)


def test_joined_biases_and_batches_have_the_nearest_products() -> None:
    problem, _ = given("perceptron")
    model = problem[0]
    x = {name: each for name, each in model.named_parameters() if name.startswith("0.")}
    _, loss, _, inputs, labels = problem
    F = hodiff.GaussNewtonOperator(model, loss, x, inputs, labels).to_dense()
    # From (weight, bias) to rows (weight, bias) of each output.
    order = torch.tensor([[4 * 3 + i if j == 3 else 3 * i + j for j in range(4)] for i in range(4)]).reshape(-1)
    expected = torch.empty_like(F)
    expected[order[:, None], order] = nearest(F[order][:, order], 4, 4)
    data = [(inputs[:2], labels[:2]), (inputs[2:], labels[2:])]
    for options in ({"chunk_size": 1}, {"chunk_size": None}):
        A = KFOCOperator(model, loss, x, data=data, tolerance=1e-9, **options)
        close(A.to_dense(), expected, 1e-7)


def test_power_method_warns_unless_it_converges() -> None:
    problem, _ = given("tokens")
    A = KFOCOperator(*problem, iterations=2, tolerance=1e-12)
    with pytest.warns(hodiff.HodiffWarning, match="factors changed by .* in pass 2"):
        A.trace()


@pytest.mark.parametrize("name", ["iterations", "tolerance"])
def test_settings_out_of_range_are_rejected(name: str) -> None:
    problem, _ = given("a row")
    with pytest.raises(hodiff.InputError, match=f"KFOCOperator: {name}: expected"):
        KFOCOperator(*problem, **{name: -1})
