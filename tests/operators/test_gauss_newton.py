"""Tests of the Gauss-Newton operator against J^T H J with the textbook Hessian of the loss."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import ravel
from operators.cases import MODELS, ReverseOnce, categorical_hessian, close, problem, squares_hessian, unravel
from torch import Tensor, nn
from torch.func import jacrev

import hodiff
from hodiff.operators import GaussNewtonOperator, HessianOperator

ALL = pytest.mark.parametrize("name", MODELS)
REDUCTIONS = pytest.mark.parametrize("reduction", ["mean", "sum"])


@pytest.mark.one_in(3)
@ALL
@REDUCTIONS
def test_matches_jacobian_hessian_jacobian_product(name: str, reduction: str) -> None:
    p = problem(name)
    loss, expected = p.reduced(reduction), p.gauss_newton(reduction)
    close(GaussNewtonOperator(p.model, loss, p.x, p.inputs, p.targets, reduction=reduction).to_dense(), expected)
    close(GaussNewtonOperator(p.model, loss, p.x, data=p.batches(2, 3), reduction=reduction).to_dense(), expected)
    close(GaussNewtonOperator(p.call, loss, p.x, data=p.batches(4), reduction=reduction).to_dense(), expected)


@ALL
def test_vectors_blocks_and_pytrees_agree(name: str) -> None:
    p = problem(name)
    A = GaussNewtonOperator(p.model, p.loss.function, p.x, p.inputs, p.targets)
    V = torch.randn(A.shape[0], 3).double()
    expected = p.gauss_newton() @ V
    close(A @ V, expected)
    close(torch.stack([A @ v for v in V.T], dim=1), expected)
    close(ravel(A @ unravel(V[:, 0], p.x)), expected[:, 0])
    close(A.T @ V, expected)


def test_linear_model_matches_its_hessian() -> None:
    p = problem("sequence")
    A = GaussNewtonOperator(p.model, p.loss.function, p.x, p.inputs, p.targets)
    close(A.to_dense(), p.hessian())


@pytest.mark.parametrize(
    "settings", [{"cache": False}, {"memory_budget": 1}, {"chunk_size": 2}, {"correct": False}, {"progress": True}]
)
def test_settings_do_not_change_products(settings: dict[str, Any]) -> None:
    p = problem("skip")
    A = GaussNewtonOperator(p.model, p.loss.function, p.x, data=p.batches(2, 3), **settings)
    V = torch.randn(A.shape[0], 5).double()
    for _ in range(2):
        close(A @ V, p.gauss_newton() @ V)


def test_class_weights_and_label_smoothing_are_included() -> None:
    """The Hessian includes class weights and label smoothing."""
    p = problem("mlp")
    weight = torch.tensor([1.0, 2.0, 0.5]).double()
    loss = nn.CrossEntropyLoss(weight=weight, label_smoothing=0.2)
    A = GaussNewtonOperator(p.model, loss, p.x, p.inputs, p.targets)
    outputs, J = p.call(p.x, p.inputs), p.jacobian()
    # The log-partition function has weight (1 - e) w_y + e mean(w), and the linear terms have no curvature.
    heavy = (0.8 * weight[p.targets] + 0.2 * weight.mean()).repeat_interleave(3)
    expected = J.mT @ (heavy[:, None] * categorical_hessian(outputs)) @ J / weight[p.targets].sum()
    close(A.to_dense(), expected)


def test_several_outputs_match() -> None:
    """The outputs are a pytree of different shapes, and the loss mixes them."""
    W = {"a": torch.randn(3, 2).double(), "b": torch.randn(3, 1).double()}
    X, classes = torch.randn(4, 3).double(), torch.randint(2, (4,))

    def model(x: Any, inputs: Tensor) -> Any:
        hidden = torch.tanh(inputs)
        return {"logits": hidden @ x["a"], "more": [hidden @ x["b"] ** 2]}

    def loss(outputs: Any, targets: Tensor) -> Tensor:
        heads = F.cross_entropy(outputs["logits"], targets)
        return heads * outputs["more"][0].square().mean()

    def outputs_of(flat: Tensor) -> Tensor:
        return ravel(model(unravel(flat, W), X))

    J = jacrev(outputs_of)(ravel(W))
    z = ravel(model(W, X))
    like = model(W, X)
    H = torch.autograd.functional.hessian(lambda z: loss(unravel(z, like), classes), z)
    A = GaussNewtonOperator(model, loss, W, X, classes)
    close(A.to_dense(), J.mT @ H @ J)
    v = torch.randn(9).double()
    close(A @ v, J.mT @ H @ J @ v)


def test_output_that_ignores_the_point_counts_in_the_loss() -> None:
    x = torch.randn(2).double()
    A = GaussNewtonOperator(
        lambda x, i: (i * x, i), lambda z, t: (z[0] * z[1]).sum() ** 2, x, torch.ones(2).double(), 0
    )
    close(A.to_dense(), 2 * torch.ones(2, 2).double())


def test_linear_loss_has_zero_matrix() -> None:
    A = GaussNewtonOperator(lambda x, i: i * x, lambda z, t: z.sum(), torch.randn(3), torch.ones(3), None)
    assert not A.to_dense().any()
    assert not (A @ torch.ones(3)).any()


def test_dict_batches_match() -> None:
    p = problem("regression")
    batch = {"inputs": p.inputs, "labels": p.targets}
    of_batch = [{"inputs": i, "labels": t} for i, t in p.batches(2)]

    def model(x: Any, batch: Any) -> Tensor:
        return p.call(x, batch["inputs"])

    def loss(outputs: Tensor, batch: Any) -> Tensor:
        return F.mse_loss(outputs, batch["labels"])

    for arguments, options in (((batch,), {}), ((), {"data": of_batch})):
        close(GaussNewtonOperator(model, loss, p.x, *arguments, **options).to_dense(), p.gauss_newton())


def test_blocks_and_other_points_match() -> None:
    p = problem("mlp")
    A = GaussNewtonOperator(p.model, p.loss.function, p.x, data=p.batches(2))
    G = p.gauss_newton()
    close(A.block("2").to_dense(), G[12:, 12:])
    close(A.block(["2.bias", "0.bias"]).to_dense(), _submatrix(G, [21, 22, 23, 9, 10, 11]))
    moved = {key: value + 0.3 for key, value in p.x.items()}
    close(A.at(moved).to_dense(), GaussNewtonOperator(p.model, p.loss.function, moved, p.inputs, p.targets).to_dense())
    assert (A.at(moved).to_dense() - G).abs().max() > 1e-3


def _submatrix(G: Tensor, rows: list[int]) -> Tensor:
    return G[rows][:, rows]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 5e-2)])
def test_lower_precision_matches_float64(dtype: torch.dtype, tolerance: float) -> None:
    p = problem("regression")
    x = {key: value.to(dtype) for key, value in p.x.items()}
    A = GaussNewtonOperator(p.model, F.mse_loss, x, p.inputs.to(dtype), p.targets.to(dtype))
    v = torch.randn(A.shape[0])
    exact = p.gauss_newton() @ v.double()
    assert (A @ v - exact).norm() < tolerance * exact.norm()


def test_ignored_targets_do_not_count() -> None:
    p = problem("mlp")
    targets = p.targets.clone()
    targets[1] = -100
    A = GaussNewtonOperator(p.model, F.cross_entropy, p.x, p.inputs, targets)
    keep = torch.tensor([0, 2, 3, 4])
    fewer = GaussNewtonOperator(p.model, F.cross_entropy, p.x, p.inputs[keep], targets[keep])
    close(A.to_dense(), fewer.to_dense())


def test_missing_derivative_names_the_operator() -> None:
    x = torch.randn(3)
    A = GaussNewtonOperator(lambda x, i: ReverseOnce.apply(x), F.mse_loss, x, x, x)
    with pytest.raises(hodiff.RouteError, match="ReverseOnce"):
        A @ x
    A = GaussNewtonOperator(lambda x, i: F.hardsigmoid(x), F.mse_loss, x, x, x, correct=False)
    with pytest.raises(hodiff.RouteError, match="hardsigmoid"):
        A @ x


def test_rejects_bad_arguments() -> None:
    p = problem("mlp")
    with pytest.raises(hodiff.InputError, match="expected either data="):
        GaussNewtonOperator(p.model, F.cross_entropy, p.x)
    with pytest.raises(hodiff.InputError, match="expected either data="):
        GaussNewtonOperator(p.model, F.cross_entropy, p.x, p.inputs, p.targets, 3)
    with pytest.raises(hodiff.InputError, match="and data="):
        GaussNewtonOperator(p.model, F.cross_entropy, p.x, p.inputs, p.targets, data=p.batches(2))
    with pytest.raises(hodiff.InputError, match="model: expected a callable"):
        GaussNewtonOperator(3, F.cross_entropy, p.x, p.inputs, p.targets)
    with pytest.raises(hodiff.InputError, match=r"loss: .*one real number"):
        GaussNewtonOperator(p.model, lambda z, y: z, p.x, p.inputs, p.targets) @ p.x
    with pytest.raises(hodiff.InputError, match="expected a real floating-point tensor"):
        GaussNewtonOperator(lambda x, i: (x, "label"), lambda z, y: z[0].sum(), torch.ones(2), 1, 2) @ torch.ones(2)
    with pytest.raises(hodiff.InputError, match="does not depend"):
        GaussNewtonOperator(lambda x, i: i, F.mse_loss, torch.ones(2), torch.ones(2), torch.ones(2)) @ torch.ones(2)


@pytest.mark.parametrize(
    "loss", [nn.CrossEntropyLoss(reduction="sum"), nn.MSELoss(reduction="sum"), lambda z, y, reduction="sum": z.sum()]
)
def test_rejects_loss_with_another_reduction(loss: Any) -> None:
    p = problem("mlp")
    with pytest.raises(hodiff.InputError, match=r"reduction: expected 'sum', .* got 'mean'"):
        GaussNewtonOperator(p.model, loss, p.x, data=p.batches(2))


def test_is_positive_semidefinite_where_the_hessian_is_not() -> None:
    p = problem("regression")
    batch = (p.inputs, p.targets)
    hessian = torch.linalg.eigvalsh(HessianOperator(p.objective(), p.x, batch).to_dense())
    gauss_newton = torch.linalg.eigvalsh(GaussNewtonOperator(p.model, F.mse_loss, p.x, *batch).to_dense())
    assert hessian.min() < -1e-3
    assert gauss_newton.min() > -1e-12
    assert squares_hessian(torch.ones(1)).item() == 2


def test_rejects_point_that_the_model_does_not_read() -> None:
    module = torch.nn.Linear(3, 2)
    inputs, targets = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 1, 0])
    loss = torch.nn.functional.cross_entropy
    for point in (list(module.parameters()), {"weights": torch.ones(2, 3)}):
        with pytest.raises(hodiff.InputError, match="x: expected a dict with names of the module's parameters"):
            hodiff.GaussNewtonOperator(module, loss, point, inputs, targets)
    # The outputs have a graph to the closed-over parameters, but do not depend on x.
    operator = hodiff.GaussNewtonOperator(lambda x, inputs: module(inputs), loss, torch.ones(6), inputs, targets)
    with pytest.raises(hodiff.InputError, match="does not depend on the differentiated argument"):
        _ = operator @ torch.ones(6)
