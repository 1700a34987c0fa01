"""The transforms of `hodiff` as functions of point and vector, by gradgradcheck and SciPy's Hessian."""

import pytest
import torch
import torch.nn.functional as F
from drawing import draw
from scipy.differentiate import jacobian as scipy_jacobian
from second_order import Row, assert_listed, assert_second_order, parametrize_by_rows, public
from torch import Tensor

import hodiff
from hodiff import authoring, checks, implicit, operators
from hodiff.checks import scipy_hessian

X, V = draw(2), draw(2, seed=1)


def f(x: Tensor) -> Tensor:
    """Function with derivatives of every order."""
    return (x.sin() * x.roll(1)).sum() + (x**4).sum() / 4


def g(x: Tensor) -> Tensor:
    return torch.stack([x[0].exp() * x[1], (x**3).sum()])


def with_corrections(x: Tensor) -> Tensor:
    with hodiff.corrected():
        return F.layer_norm(torch.cat([x, x**2]), (4,)) ** 2


def tree(x: Tensor) -> dict[str, Tensor]:
    return {"a": x[:1], "b": x[1:]}


def of_tree(x: dict[str, Tensor]) -> Tensor:
    return f(torch.cat([x["a"], x["b"]]))


ROWS = [
    *(
        Row("hvp", lambda x, v, r=route: hodiff.hvp(f, x, v, route=r), (X, V), route, duals="forward" not in route)
        for route in hodiff.ROUTES
    ),
    *(
        Row(
            "value_grad_hvp",
            lambda x, v, r=route: hodiff.value_grad_hvp(f, x, v, route=r),
            (X, V),
            route,
            duals="forward" not in route,
            slow=route != hodiff.ROUTES[1],
        )
        for route in hodiff.ROUTES
    ),
    Row("grad_and_hvp", lambda x, v: torch.cat(hodiff.grad_and_hvp(f, x, v)), (X, V)),
    Row("hvp", lambda x, v: hodiff.hvp(of_tree, tree(x), tree(v)), (X, V), "trees"),
    Row("hvp_function", lambda x, v: hodiff.hvp_function(f)(x, v), (X, V)),
    Row("hessian", lambda x: hodiff.hessian(f)(x), (X,)),
    Row("hessian", lambda x, y: hodiff.hessian(lambda x, y: f(x * y), argnums=(0, 1))(x, y), (X, V), "two arguments"),
    Row("hessian_matrix", lambda x: hodiff.hessian_matrix(of_tree, tree(x)), (X,)),
    Row("laplacian", lambda x: hodiff.laplacian(f)(x), (X,)),
    Row("bilaplacian", lambda x: hodiff.bilaplacian(f)(x), (X,)),
    Row("partial", lambda x: hodiff.partial(f, (0, 1))(x), (X,)),
    Row("hessian_diagonal", lambda x: hodiff.hessian_diagonal(f)(x), (X,)),
    *(
        Row("jacobian", lambda x, m=mode: hodiff.jacobian(g, mode=m)(x), (X,), mode, duals=mode == "reverse")
        for mode in ("forward", "reverse")
    ),
    *(
        Row(
            "directional_derivatives",
            lambda x, v, k=order: hodiff.directional_derivatives(f, x, v, order=k),
            (X, V),
            f"order {order}",
            duals=False,
            slow=order == 3,
        )
        for order in (1, 2, 3)
    ),
    Row("corrected", with_corrections, (X,)),
    # The derivatives agree because the surrogate is the function itself.
    Row("straight_through", hodiff.straight_through(torch.tanh, torch.tanh), (X,)),
]
WITHOUT = {
    "ROUTES": "names",
    "compile_gradient": "its gradients carry no graph",
    "check": "a check itself",
    "assert_differentiable": "a check itself",
    "preflight": "a check itself",
}


def test_every_public_name_has_a_row():
    elsewhere = {name for room in (authoring, checks, implicit, operators) for name in public(room)} - set(WITHOUT)
    elsewhere -= {row.name for row in ROWS}
    assert_listed(public(hodiff) - elsewhere, ROWS, WITHOUT)


@pytest.mark.one_in(21)
@parametrize_by_rows(ROWS)
def test_passes_gradgradcheck_and_scipy_hessian(row):
    assert_second_order(row)


TRUTH = scipy_hessian(f, X, initial_step=0.1).matrix
VALUES = {
    "hvp": lambda: (hodiff.hvp(f, X, V), TRUTH @ V),
    "value_grad_hvp": lambda: (hodiff.value_grad_hvp(f, X, V)[2], TRUTH @ V),
    "grad_and_hvp": lambda: (hodiff.grad_and_hvp(f, X, V)[1], TRUTH @ V),
    "hvp_function": lambda: (hodiff.hvp_function(f)(X, V), TRUTH @ V),
    "hessian": lambda: (hodiff.hessian(f)(X), TRUTH),
    "hessian_matrix": lambda: (hodiff.hessian_matrix(of_tree, tree(X)), TRUTH),
    "hessian_diagonal": lambda: (hodiff.hessian_diagonal(f)(X), TRUTH.diag()),
    "directional_derivatives": lambda: (hodiff.directional_derivatives(f, X, V, order=2)[2], V @ TRUTH @ V),
    "jacobian": lambda: (hodiff.jacobian(g)(X), torch.from_numpy(scipy_jacobian(_values, X.numpy()).df)),
}


def _values(points):
    columns = torch.from_numpy(points.reshape(2, -1).copy())
    return torch.func.vmap(g, in_dims=1, out_dims=1)(columns).numpy().reshape(points.shape)


@pytest.mark.parametrize("name", VALUES)
def test_values_match_scipy(name):
    found, expected = VALUES[name]()
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-7)
