"""Functions whose backward cannot be batched: Jacobians and Hessians compute their rows one by one."""

from typing import Any

import pytest
import torch
from torch import Tensor

import hodiff
from hodiff.errors import RouteError

D = torch.float64
X = torch.tensor([0.5, -1.2, 0.3], dtype=D)
EYE = torch.eye(3, dtype=D)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3


class GradientInside(Cube):
    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            y = x.view_as(x).requires_grad_()
            (slope,) = torch.autograd.grad((y**3).sum(), y, create_graph=True)
        return g * slope


class ReadsANumber(Cube):
    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 3 * g * x * x if g.sum().item() < 1e9 else None


class _Slope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, g, x):
        ctx.save_for_backward(g, x)
        return 3 * g * x * x

    @staticmethod
    def backward(ctx, h):
        g, x = ctx.saved_tensors
        with torch.enable_grad():
            leaves = g.detach().requires_grad_(), x.detach().requires_grad_()
            return torch.autograd.grad((3 * leaves[0] * leaves[1] ** 2 * h).sum(), leaves)


class AnotherInside(Cube):
    @staticmethod
    def backward(ctx, g):
        return _Slope.apply(g, *ctx.saved_tensors)


FUNCTIONS = [GradientInside, ReadsANumber, AnotherInside]
JACOBIANS = {
    "jacobian": lambda f: hodiff.jacobian(f)(X),
    "JacobianOperator": lambda f: hodiff.JacobianOperator(f, X).to_dense(),
    "transposed": lambda f: hodiff.JacobianOperator(f, X).T @ EYE,
    "sparse.jacobian": lambda f: hodiff.sparse.jacobian(f, pattern=EYE.bool(), method="rows")(X).to_dense(),
}
HESSIANS = {
    "hessian": lambda f: hodiff.hessian(f)(X),
    "hessian_matrix": lambda f: hodiff.hessian_matrix(f, X),
    "hessian_diagonal": lambda f: hodiff.hessian_diagonal(f)(X).diag(),
    "HessianOperator": lambda f: hodiff.HessianOperator(f, X) @ EYE,
    "sparse.hessian": lambda f: hodiff.sparse.hessian(f, pattern=EYE.bool())(X).to_dense(),
}


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("jacobian", JACOBIANS.values(), ids=JACOBIANS)
def test_jacobians_match_closed_form(function: Any, jacobian: Any) -> None:
    torch.testing.assert_close(jacobian(function.apply), (3 * X**2).diag())


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("hessian", HESSIANS.values(), ids=HESSIANS)
def test_hessians_match_closed_form(function: Any, hessian: Any) -> None:
    torch.testing.assert_close(hessian(lambda x: function.apply(x).sum()), (6 * X).diag())


class DetachedSlope(GradientInside):
    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad((y**3).sum(), y)
        return g * slope


@pytest.mark.parametrize("jacobian", JACOBIANS.values(), ids=JACOBIANS)
def test_detached_slope_is_allowed_in_jacobians_only(jacobian: Any) -> None:
    for _ in range(2):
        torch.testing.assert_close(jacobian(DetachedSlope.apply), (3 * X**2).diag())
    with pytest.raises(RouteError, match=r"DetachedSlope\.backward"):
        hodiff.hvp(lambda x: DetachedSlope.apply(x).sum(), X, X)


def test_hooks_on_tensors_are_rejected_inside_transforms() -> None:
    def f(x: Tensor) -> Tensor:
        y = x.sin()
        y.register_hook(lambda g: g)
        return (y * y).sum()

    torch.testing.assert_close(hodiff.hvp(f, X, X), 2 * X * (2 * X).cos())
    with pytest.raises(RouteError, match="registers a hook on a tensor"):
        hodiff.hvp(f, X, X, route="forward-over-forward")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensor_points_are_rejected() -> None:
    nested = torch.nested.nested_tensor([X, X[:2]])
    with pytest.raises(hodiff.errors.InputError, match="got a nested tensor of 2 float64"):
        hodiff.hvp(lambda x: (x * x).to_padded_tensor(0.0).sum(), nested, nested)
