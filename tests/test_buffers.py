"""Buffers in training mode: a derivative updates them once, like a forward pass; an operator does not update them."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hodiff

D = torch.float64
X = torch.tensor([[0.5, -1.2, 0.3], [1.0, 0.2, -0.7], [-0.4, 0.9, 2.0]], dtype=D)
DERIVATIVES = {
    "jacobian": lambda f: hodiff.jacobian(f)(X),
    "jacobian forward": lambda f: hodiff.jacobian(f, mode="forward", chunk_size=2)(X),
    "jacobian reverse": lambda f: hodiff.jacobian(f, mode="reverse")(X),
    "sparse jacobian by columns": lambda f: hodiff.sparse.jacobian(f, method="columns")(X),
    "sparse jacobian by rows": lambda f: hodiff.sparse.jacobian(f, method="rows")(X),
    "sparse hessian": lambda f: hodiff.sparse.hessian(lambda x: f(x).sum())(X),
    "hessian": lambda f: hodiff.hessian(lambda x: f(x).sum())(X),
    "hessian diagonal": lambda f: hodiff.hessian_diagonal(lambda x: f(x).sum())(X),
    **{
        route: lambda f, route=route: hodiff.hvp(lambda x: f(x).sum(), X, X, route=route)
        for route in ("reverse-over-reverse", "forward-over-reverse", "reverse-over-forward", "forward-over-forward")
    },
    "value_grad_hvp": lambda f: hodiff.value_grad_hvp(lambda x: f(x).sum(), X, X, route="forward-over-forward"),
    "laplacian": lambda f: hodiff.laplacian(lambda x: f(x).sum())(X),
}
OPERATORS = {
    "HessianOperator": lambda f: hodiff.HessianOperator(lambda x: f(x).sum(), X) @ X,
    "JacobianOperator": lambda f: hodiff.JacobianOperator(f, X) @ X,
}


def _batches_seen(derivative: Any) -> tuple[Tensor, Tensor]:
    norm = nn.BatchNorm1d(3, dtype=D)
    derivative(lambda x: norm(x).sin())
    return norm.num_batches_tracked, norm.running_mean


@pytest.mark.parametrize("derivative", DERIVATIVES.values(), ids=DERIVATIVES)
def test_derivatives_update_buffers_once(derivative: Any) -> None:
    count, mean = _batches_seen(derivative)
    assert int(count) == 1
    torch.testing.assert_close(mean, 0.1 * X.mean(0))


@pytest.mark.parametrize("derivative", OPERATORS.values(), ids=OPERATORS)
def test_operators_do_not_update_buffers(derivative: Any) -> None:
    count, mean = _batches_seen(derivative)
    assert (int(count), mean.tolist()) == (0, [0.0, 0.0, 0.0])
