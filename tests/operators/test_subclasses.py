"""Tests of operators and transforms with tensor subclasses, in every grad mode, against closed forms."""

import pytest
import torch

import hodiff


class Subclass(torch.Tensor):
    pass


X = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
V = torch.tensor([1.0, -1.0, 0.5], dtype=torch.float64)
SUB = X.as_subclass(Subclass)


def cubes(x):
    return (x**3).sum()


# Products with V, and their closed forms.
PRODUCTS = {
    "Hessian at a subclass": (lambda: hodiff.HessianOperator(cubes, SUB) @ V, 6 * X * V),
    "Hessian by a closed-over subclass": (
        lambda: hodiff.HessianOperator(lambda y: (y**3 * SUB).sum(), X) @ V,
        6 * X**2 * V,
    ),
    "Hessian over data of a subclass": (
        lambda: hodiff.HessianOperator(lambda y, batch: (y**3 * batch).sum(), X, data=[SUB]) @ V,
        6 * X**2 * V,
    ),
    "Gauss-Newton": (
        lambda: (
            hodiff.GaussNewtonOperator(
                lambda p, i: i * p, lambda o, t: (o - t).pow(2).sum(), X, SUB[None], torch.zeros(1, 3, dtype=X.dtype)
            )
            @ V
        ),
        2 * X**2 * V,
    ),
    "Jacobian": (lambda: hodiff.JacobianOperator(lambda p: p**2, SUB) @ V, 2 * X * V),
    "Jacobian transposed": (lambda: hodiff.JacobianOperator(lambda p: p**2, SUB).T @ V, 2 * X * V),
    "hvp": (lambda: hodiff.hvp(cubes, SUB, V), 6 * X * V),
    "hvp_function": (lambda: hodiff.hvp_function(cubes)(SUB, V), 6 * X * V),
    "dense Hessian": (lambda: hodiff.hessian_matrix(cubes, SUB) @ V, 6 * X * V),
    "diagonal": (lambda: hodiff.hessian_diagonal(cubes)(SUB) * V, 6 * X * V),
    "jacobian": (lambda: hodiff.jacobian(lambda p: p**2)(SUB) @ V, 2 * X * V),
}


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_with_tensor_subclasses_match(name, mode):
    product, expected = PRODUCTS[name]
    with mode():
        found = product()
    torch.testing.assert_close(found.detach().as_subclass(torch.Tensor), expected)
