"""Derivatives through matrices and factors of operators match closed forms; other dependences raise."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import hodiff
from hodiff import InputError
from hodiff.operators import DiagonalOperator, IdentityOperator, InverseOperator, LinearOperator, MatrixOperator, Space

X = torch.tensor([0.3, 0.7, -0.5], dtype=torch.float64)
V = torch.tensor([1.0, 0.5, 2.0], dtype=torch.float64)
EYE = torch.eye(3, dtype=torch.float64)


def matrix(x: Tensor) -> Tensor:
    return torch.diag(x**2 + 1) + x.outer(x.sin())


# A composed operator from tensors that depend on x, times v, and the same product with plain tensors.
COMPOSED: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "matrix": (lambda x, v: MatrixOperator(matrix(x)) @ v, lambda x, v: matrix(x) @ v),
    "transposed": (lambda x, v: MatrixOperator(matrix(x)).T @ v, lambda x, v: matrix(x).T @ v),
    "diagonal": (lambda x, v: DiagonalOperator(x**3) @ v, lambda x, v: x**3 * v),
    "multiple": (lambda x, v: x.prod() * IdentityOperator(v) @ v, lambda x, v: x.prod() * v),
    "block": (
        lambda x, v: (
            (DiagonalOperator({"a": x[:1] ** 3, "b": x[1:]}) + IdentityOperator({"a": x[:1], "b": x[1:]}))
            .block("b")
            .damped(2.0)
            @ v[1:]
        ),
        lambda x, v: (x[1:] + 3) * v[1:],
    ),
    "expression with a Hessian": (
        lambda x, v: (
            (MatrixOperator(matrix(x)) @ hodiff.HessianOperator(lambda y: (y**4).sum(), V) - DiagonalOperator(x)).T @ v
        ),
        lambda x, v: 12 * V**2 * (matrix(x).T @ v) - x * v,
    ),
}


@pytest.mark.parametrize("name", COMPOSED)
def test_derivatives_by_the_data_of_composed_operators_match(name: str) -> None:
    ours, theirs = COMPOSED[name]
    for transform in (torch.func.jacrev, torch.func.jacfwd, torch.func.hessian):
        for argnums in (0, 1):
            torch.testing.assert_close(transform(ours, argnums)(X, V), transform(theirs, argnums)(X, V))
    stacked = torch.stack([X, 2 * X])
    for in_dims in ((0, None), (0, 0)):
        batch = (stacked, V if in_dims[1] is None else stacked)
        torch.testing.assert_close(torch.func.vmap(ours, in_dims)(*batch), torch.func.vmap(theirs, in_dims)(*batch))
    # Differentiate by both at once, since neither may treat the other as a constant.
    leaves = [each.clone().requires_grad_() for each in (X, V)]
    found = torch.autograd.grad(ours(*leaves).square().sum(), leaves)
    torch.testing.assert_close(found, torch.autograd.grad(theirs(*leaves).square().sum(), leaves))


class Scaling(LinearOperator):
    def __init__(self, factors: Tensor):
        super().__init__(Space.of(torch.ones_like(V)), symmetric=True)
        self.factors = factors

    def multiply(self, block: Tensor) -> Tensor:
        return self.factors[:, None] * block


def model(parameters: Tensor, inputs: Tensor) -> Tensor:
    return parameters * inputs


REFUSED: dict[str, Callable[[Tensor], Tensor]] = {
    "a class of the user's": lambda x: Scaling(x) @ V,
    "its transpose and multiple": lambda x: (2 * Scaling(x).T) @ V,
    "an inverse": lambda x: InverseOperator(MatrixOperator(EYE + x.square().diag())) @ V,
    "what a function closes over": lambda x: hodiff.HessianOperator(lambda y: (y.sin() * x).sum(), V) @ V,
    "a further argument": lambda x: hodiff.HessianOperator(lambda y, z: (y.sin() * z).sum(), V, x) @ V,
    "batches": lambda x: hodiff.HessianOperator(lambda y, z: (y * z).sin().sum(), V, data=[x, 2 * x]) @ V,
    "the point": lambda x: hodiff.HessianOperator(lambda y: (y**3).sum(), x) @ V,
    "another point": lambda x: CUBES.at(x) @ V,
    "a Jacobian": lambda x: hodiff.JacobianOperator(lambda y: y.sin() * x, V) @ V,
    "inputs of a model": lambda x: hodiff.GaussNewtonOperator(model, torch.nn.functional.mse_loss, V, x, V) @ V,
}
CUBES = hodiff.HessianOperator(lambda y: (y**3).sum(), V)


@pytest.mark.parametrize("name", REFUSED)
def test_lost_dependence_is_rejected(name: str) -> None:
    f = REFUSED[name]
    with pytest.raises(InputError, match="constant"):
        torch.func.grad(lambda x: f(x).sum())(X)
    with pytest.raises(InputError, match="constant"):
        torch.func.jvp(f, (X,), (V,))
    with pytest.raises(InputError, match="constant"):
        torch.func.vmap(f)(torch.stack([X, V]))
    with pytest.raises(InputError, match="constant"):
        torch.func.vmap(torch.func.grad(lambda x: f(x).sum()))(torch.stack([X, V]))


def test_lost_dependence_on_dual_numbers_is_rejected() -> None:
    with forward_ad.dual_level(), pytest.raises(InputError, match="constant"):
        Scaling(forward_ad.make_dual(X, V)) @ V


def test_constant_operators_work_inside_transforms() -> None:
    def f(v: Tensor) -> Tensor:
        A = hodiff.HessianOperator(lambda y: (y**4).sum() * X.sum(), V) + Scaling(X)
        return (A @ v).square().sum() + (InverseOperator(DiagonalOperator(V)) @ v).sum()

    diagonal = 12 * V**2 * X.sum() + X
    torch.testing.assert_close(torch.func.grad(f)(X), 2 * diagonal**2 * X + 1 / V)
    torch.testing.assert_close(torch.func.hessian(f)(X), torch.diag(2 * diagonal**2))
    torch.testing.assert_close(torch.func.vmap(f)(torch.stack([X, V])), torch.stack([f(X), f(V)]))


MADE_INSIDE: dict[str, Callable[[], LinearOperator]] = {
    "Jacobian": lambda: hodiff.JacobianOperator(lambda y: y**3, X),
    "Gram": lambda: hodiff.GramOperator(lambda y, z: y**3 * z, X, torch.ones_like(X)),
    "Fisher": lambda: hodiff.FisherOperator(
        lambda y, z: y**3 * z, torch.nn.functional.mse_loss, X, torch.ones_like(X), V
    ),
    "one draw": lambda: hodiff.GaussNewtonOperator(
        lambda y, z: y**3 * z, torch.nn.functional.mse_loss, X, torch.ones_like(X), V, randomness="fixed"
    ),
}
SLOPES = 3 * X**2
DIAGONALS = {
    "Jacobian": SLOPES,
    "Gram": SLOPES**2,
    "Fisher": 2 * SLOPES**2 / len(X),
    "one draw": 2 * SLOPES**2 / len(X),
}


@pytest.mark.parametrize("name", MADE_INSIDE)
def test_operators_are_made_inside_transforms_of_the_vector(name: str) -> None:
    def f(v: Tensor) -> Tensor:
        return MADE_INSIDE[name]() @ v

    diagonal = DIAGONALS[name]
    torch.testing.assert_close(torch.func.vmap(f)(torch.stack([X, V])), diagonal * torch.stack([X, V]))
    torch.testing.assert_close(torch.func.jvp(f, (X,), (V,)), (diagonal * X, diagonal * V))
    torch.testing.assert_close(torch.func.grad(lambda v: f(v).square().sum())(V), 2 * diagonal**2 * V)
    torch.testing.assert_close(
        torch.func.vmap(torch.func.grad(lambda v: f(v).square().sum()))(torch.stack([X, V])),
        2 * diagonal**2 * torch.stack([X, V]),
    )
