"""Tests of the Jacobian operator and its transpose against torch.func's dense Jacobian."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import ravel
from operators.cases import MODELS, ReverseOnce, close, problem, unravel
from torch import Tensor, nn
from torch.func import functional_call, jacrev

import hodiff
from hodiff.operators import JacobianOperator

ALL = pytest.mark.parametrize("name", MODELS)


@ALL
@pytest.mark.parametrize("chunk_size", ["auto", 2])
def test_matches_dense_jacobian(name: str, chunk_size: Any) -> None:
    p = problem(name)
    J = JacobianOperator(p.call, p.x, p.inputs, chunk_size=chunk_size)
    expected = p.jacobian()
    close(J.to_dense(), expected)
    close(J.T.to_dense(), expected.T)
    v, u = torch.randn(J.shape[1]).double(), torch.randn(J.shape[0]).double()
    close(J @ v, expected @ v)
    close(J.T @ u, expected.T @ u)


@ALL
def test_transpose_is_adjoint(name: str) -> None:
    p = problem(name)
    J = JacobianOperator(p.call, p.x, p.inputs)
    v, u = torch.randn(J.shape[1]).double(), torch.randn(J.shape[0]).double()
    close(u @ (J @ v), (J.T @ u) @ v)


def test_pytrees_are_accepted_and_returned() -> None:
    x = {"a": torch.randn(2, 2).double(), "b": torch.tensor(0.5).double()}

    def f(x: Any, c: Tensor) -> Any:
        return {"sum": (x["a"] ** 2).sum() * c, "parts": [x["a"] * x["b"], x["b"].sin()], "constant": c.clone()}

    J = JacobianOperator(f, x, torch.tensor(2.0).double())
    like = f(x, torch.tensor(2.0).double())
    dense = jacrev(lambda flat: ravel(f(unravel(flat, x), torch.tensor(2.0).double())))(ravel(x))
    v = {"a": torch.randn(2, 2).double(), "b": torch.tensor(1.0).double()}
    product = J @ v
    assert product.keys() == like.keys()
    assert product["sum"].shape == ()
    close(ravel(product), dense @ ravel(v))
    assert not product["constant"].any()
    close(ravel(J.T @ like), dense.T @ ravel(like))
    assert (J.T @ like).keys() == x.keys()
    close(J.T.to_dense(), dense.T)


def test_unused_leaves_and_integer_constants_are_accepted() -> None:
    x = {"used": torch.randn(3), "ignored": torch.randn(2)}
    J = JacobianOperator(lambda x, index: x["used"][index] ** 2, x, torch.tensor([2, 0]))
    dense = J.to_dense()
    used = dict(zip(J.domain.names, J.domain.select([0, 1]), strict=True))
    assert not dense[:, used["['ignored']"]].any()
    close(dense[:, used["['used']"]][0], torch.tensor([0, 0, 2 * x["used"][2]]), 1e-6)


def test_composition_matches_gauss_newton() -> None:
    p = problem("regression")
    J = JacobianOperator(p.call, p.x, p.inputs)
    close(((2 / 15) * (J.T @ J)).to_dense(), p.gauss_newton())


def test_missing_and_wrong_forward_rules_are_avoided() -> None:
    """The function contains one operator without a forward rule in torch, and one with a wrong rule."""
    x = torch.randn(2, 4).double()

    def f(x: Tensor) -> Tensor:
        return F.layer_norm(F.huber_loss(x, 2 * x, reduction="none"), (4,))

    J = JacobianOperator(f, x)
    close(J.to_dense(), jacrev(f)(x).reshape(8, 8), 1e-11)


def test_buffers_and_grad_modes_do_not_matter() -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).double()
    x = {key: value.detach() for key, value in module.named_parameters()}
    before = {key: value.clone() for key, value in module.named_buffers()}
    X = torch.randn(4, 2).double()
    with torch.inference_mode():
        J = JacobianOperator(lambda p: functional_call(module, p, (X,)), x)
        J @ x
    J.T @ torch.ones(4, 3).double()
    for key, value in module.named_buffers():
        assert torch.equal(value, before[key])


def test_missing_derivative_names_the_operator() -> None:
    x = torch.randn(3)
    with pytest.raises(hodiff.RouteError, match=r"JacobianOperator: .*ReverseOnce"):
        JacobianOperator(ReverseOnce.apply, x)
    with pytest.raises(hodiff.RouteError, match="hardsigmoid"):
        JacobianOperator(F.hardsigmoid, x, correct=False)


def test_rejects_bad_arguments() -> None:
    x = torch.randn(3)
    with pytest.raises(hodiff.InputError, match="does not depend"):
        JacobianOperator(lambda x: torch.ones(2), x)
    with pytest.raises(hodiff.InputError, match="must return real floating-point"):
        JacobianOperator(lambda x: (x, 3), x)
    with pytest.raises(hodiff.InputError, match="f: expected a callable"):
        JacobianOperator(x, x)
    with pytest.raises(hodiff.InputError, match="chunk_size"):
        JacobianOperator(torch.sin, x, chunk_size=-1)
    with pytest.raises(hodiff.InputError, match=r"x: expected plain tensors"):
        torch.func.grad(lambda x: (JacobianOperator(torch.sin, x) @ torch.ones(3)).sum())(x)
    with pytest.raises(hodiff.InputError, match="v: expected a floating-point tensor"):
        JacobianOperator(torch.sin, x) @ torch.randn(4)
