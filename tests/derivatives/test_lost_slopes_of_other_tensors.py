"""Functions that detach a tensor other than x: products by x are correct, their derivatives by that tensor raise."""

from typing import Any

import pytest
import torch
from custom_functions import old_style

import hodiff
from hodiff.errors import RouteError

X = torch.tensor([0.5, -1.2], dtype=torch.float64)
V = torch.tensor([1.0, 2.0], dtype=torch.float64)


def of_weight(x, w):
    return x.square() * w.cos(), x, w, w.cos()


def slopes(g, x, w, cosine):
    return 2 * g * x * cosine, -g * x.square() * w.sin()


# x² cos w, whose backward treats cos w as a constant, or recomputes it
Weighted = old_style("Weighted", of_weight, lambda ctx, g: slopes(g, *ctx.saved_tensors))
Right = old_style("Right", of_weight, lambda ctx, g: slopes(g, *ctx.saved_tensors[:2], ctx.saved_tensors[1].cos()))


def _weight() -> torch.Tensor:
    return torch.tensor(0.7, dtype=torch.float64, requires_grad=True)


PRODUCTS = {
    "hvp": lambda f: hodiff.hvp(f, X, V),
    "hessian": lambda f: hodiff.hessian(f)(X) @ V,
    "hessian_matrix": lambda f: hodiff.hessian_matrix(f, X) @ V,
    "value_grad_hvp": lambda f: hodiff.value_grad_hvp(f, X, V)[2],
}


@pytest.mark.parametrize("product", PRODUCTS.values(), ids=PRODUCTS)
def test_product_is_right_and_its_detached_derivative_is_rejected(product: Any) -> None:
    w = _weight()
    found = product(lambda x: Weighted.apply(x, w).sum())
    torch.testing.assert_close(found, 2 * w.cos() * V)
    if found.requires_grad:  # only some routes record a graph
        with pytest.raises(RouteError, match=r"Weighted\.backward .* takes"):
            torch.autograd.grad(found.sum(), w)


@pytest.mark.parametrize("product", PRODUCTS.values(), ids=PRODUCTS)
def test_right_function_has_a_differentiable_product(product: Any) -> None:
    w = _weight()
    found = product(lambda x: Right.apply(x, w).sum())
    torch.testing.assert_close(found, 2 * w.cos() * V)
    torch.testing.assert_close(torch.autograd.grad(found.sum(), w)[0], -2 * w.sin() * V.sum())


def test_derivatives_by_other_tensors_are_right() -> None:
    """Derivatives of a product by the point and by other tensors are right."""
    w, scale = _weight(), _weight()
    x = X.clone().requires_grad_()
    found = hodiff.hvp(lambda x: (scale * x).square().square().sum() + Weighted.apply(x, w).sum(), x, V)
    by_x, by_scale = torch.autograd.grad(found.sum(), (x, scale), retain_graph=True)
    torch.testing.assert_close(by_x, 24 * scale**4 * x * V)
    torch.testing.assert_close(by_scale, (48 * scale**3 * x**2 * V).sum())
    with pytest.raises(RouteError, match=r"Weighted\.backward"):
        found.sum().backward()


def test_detached_derivative_is_rejected_every_time() -> None:
    w = _weight()
    for _ in range(6):
        found = hodiff.hvp(lambda x: Weighted.apply(x, w).sum(), X, V)
        with pytest.raises(RouteError, match=r"Weighted\.backward"):
            found.sum().backward()
    assert w.grad is None


def test_detached_hypergradient_is_rejected() -> None:
    w = _weight()
    adapted = hodiff.meta.adapt(
        lambda x, _: Weighted.apply(x, w).sum(), X, torch.zeros(1), hodiff.meta.SGD(0.1), steps=1
    )
    torch.testing.assert_close(adapted, X - 0.2 * X * w.cos())
    with pytest.raises(RouteError, match=r"Weighted\.backward"):
        torch.autograd.grad(adapted.sum(), w)
