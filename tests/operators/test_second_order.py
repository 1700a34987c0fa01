"""Tests of operator products with gradgradcheck and SciPy's Hessian, and of matrices against SciPy's derivatives."""

import pytest
import torch
from drawing import draw
from scipy.differentiate import jacobian as scipy_jacobian
from second_order import Row, assert_listed, assert_second_order, parametrize_by_rows, public
from torch import Tensor
from torch.nn.functional import mse_loss

from hodiff import operators
from hodiff.checks import scipy_hessian
from hodiff.operators import (
    BlockDiagonalOperator,
    DiagonalOperator,
    EKFACOperator,
    EmpiricalFisherOperator,
    FisherOperator,
    GaussNewtonOperator,
    GramOperator,
    HessianOperator,
    IdentityOperator,
    InverseOperator,
    JacobianOperator,
    KFACOperator,
    KFOCOperator,
    LowRankPlusDiagonalOperator,
    MatrixOperator,
    ShampooOperator,
)

X, V, M = draw(2), draw(2, seed=1), draw(2, 2, seed=2)
INPUTS, TARGETS = draw(3, 2, seed=3), draw(3, seed=4)


def f(x: Tensor) -> Tensor:
    return (x.sin() * x.roll(1)).sum() + (x**4).sum() / 4


def model(x: Tensor, inputs: Tensor) -> Tensor:
    return (inputs * x).sin().sum(1)


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).cosh().mean()


HESSIAN = HessianOperator(f, X)
GAUSS_NEWTON = GaussNewtonOperator(model, loss, X, INPUTS, TARGETS)
FISHER = FisherOperator(model, mse_loss, X, INPUTS, TARGETS)
EMPIRICAL = EmpiricalFisherOperator(model, mse_loss, X, INPUTS, TARGETS)
LAYER = torch.nn.Linear(2, 1, bias=False, dtype=torch.float64)
KFAC = KFACOperator(LAYER, mse_loss, {"weight": X[None]}, INPUTS, TARGETS[:, None])
EKFAC = EKFACOperator(LAYER, mse_loss, {"weight": X[None]}, INPUTS, TARGETS[:, None])
SHAMPOO = ShampooOperator(LAYER, mse_loss, {"weight": X[None]}, INPUTS, TARGETS[:, None])
KFOC = KFOCOperator(LAYER, mse_loss, {"weight": X[None]}, INPUTS, TARGETS[:, None])
BLOCKS = BlockDiagonalOperator(HESSIAN)
JACOBIAN = JacobianOperator(model, X, INPUTS)
GRAM = GramOperator(model, X, INPUTS)

# Products are linear and differentiable in the vector; `second_order` contracts them nonlinearly.
ROWS = [
    Row("HessianOperator", lambda v: HESSIAN @ v, (V,)),
    Row("GaussNewtonOperator", lambda v: GAUSS_NEWTON @ v, (V,)),
    Row("FisherOperator", lambda v: FISHER @ v, (V,)),
    Row("EmpiricalFisherOperator", lambda v: EMPIRICAL @ v, (V,)),
    Row("JacobianOperator", lambda v: JACOBIAN @ v, (V,)),
    Row("JacobianOperator", lambda u: JACOBIAN.T @ u, (TARGETS,), "transposed"),
    Row("GramOperator", lambda u: GRAM @ u, (TARGETS,)),
    Row("KFACOperator", lambda v: KFAC @ {"weight": v[None]}, (V,)),
    Row("EKFACOperator", lambda v: EKFAC @ {"weight": v[None]}, (V,)),
    Row("ShampooOperator", lambda v: SHAMPOO @ {"weight": v[None]}, (V,)),
    Row("KFOCOperator", lambda v: KFOC @ {"weight": v[None]}, (V,)),
    Row("BlockDiagonalOperator", lambda v: BLOCKS @ v, (V,)),
    Row("InverseOperator", lambda v: InverseOperator(FISHER, damping=0.1, tol=1e-12) @ v, (V,)),
    Row("LinearOperator", lambda v: (HESSIAN @ FISHER - 2 * MatrixOperator(M)).damped(0.5).T @ v, (V,)),
    # These are also differentiable in their data.
    Row("MatrixOperator", lambda A, v: MatrixOperator(A).T @ v, (M, V)),
    Row("DiagonalOperator", lambda d, v: DiagonalOperator(d) @ v, (X, V)),
    Row(
        "LowRankPlusDiagonalOperator",
        lambda d, U, v: LowRankPlusDiagonalOperator(d.square() + 1, U, torch.ones(1).to(d)).inverse(damping=0.5) @ v,
        (X, M[:, :1], V),
    ),
    Row("IdentityOperator", lambda c, v: c.prod() * IdentityOperator(v) @ v, (X, V)),
]
WITHOUT = {
    "Likelihood": "draws targets",
    "Space": "the structure of vectors",
    "low_rank_approximation": "its operator is a row",
}


def test_every_public_name_has_a_row():
    assert_listed(public(operators), ROWS, WITHOUT)


@pytest.mark.one_in(3)
@parametrize_by_rows(ROWS)
def test_passes_gradgradcheck_and_scipy_hessian(row):
    assert_second_order(row)


def differences(g) -> Tensor:
    """Compute the Jacobian of a function of two numbers at X by SciPy, from its values."""

    def values(points):
        columns = torch.from_numpy(points.reshape(2, -1).copy())
        return torch.func.vmap(g, in_dims=1, out_dims=1)(columns).numpy().reshape(-1, *points.shape[1:])

    return torch.from_numpy(scipy_jacobian(values, X.numpy()).df)


def gauss_newton(loss) -> Tensor:
    """Compute J^T H J from SciPy's Jacobian of the model and SciPy's Hessian of the loss."""
    J = differences(lambda x: model(x, INPUTS))
    H = scipy_hessian(lambda outputs: loss(outputs, TARGETS), model(X, INPUTS), initial_step=0.1).matrix
    return J.T @ H @ J


def of_gradients() -> Tensor:
    """Compute the mean outer product of the per-example gradients."""
    rows = differences(lambda x: (model(x, INPUTS) - TARGETS).square())
    return rows.T @ rows / len(TARGETS)


def gram() -> Tensor:
    """Compute J J^T from differences."""
    J = differences(lambda x: model(x, INPUTS))
    return J @ J.T


MATRICES = {
    "BlockDiagonalOperator": (BLOCKS, lambda: scipy_hessian(f, X, initial_step=0.1).matrix),
    "HessianOperator": (HESSIAN, lambda: scipy_hessian(f, X, initial_step=0.1).matrix),
    "GaussNewtonOperator": (GAUSS_NEWTON, lambda: gauss_newton(loss)),
    "FisherOperator": (FISHER, lambda: gauss_newton(mse_loss)),
    "EmpiricalFisherOperator": (EMPIRICAL, of_gradients),
    "JacobianOperator": (JACOBIAN, lambda: differences(lambda x: model(x, INPUTS))),
    "GramOperator": (GRAM, gram),
}


@pytest.mark.parametrize("name", MATRICES)
def test_matrices_match_scipy(name):
    A, expected = MATRICES[name]
    torch.testing.assert_close(A.to_dense(), expected(), rtol=1e-7, atol=1e-7)
