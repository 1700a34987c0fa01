"""hodiff's transforms inside and outside torch's: vmap, grad, jvp, .backward(), forward AD levels and modes.

Most tests differentiate f(x, w) = sin(w·x), whose derivatives of every order are known:
D^k f(x)[v₁, …, v_k] = sin^(k)(w·x) Π (w·vᵢ).
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import CASES, Case, ravel
from cases import case as named
from derivatives.oracles import flat_function, third_differences
from drawing import draw
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad, jacfwd, jacrev, jvp, linearize, vmap

from hodiff import ROUTES, RouteError, hessian, hessian_diagonal, hessian_matrix, hvp, jacobian, laplacian

EVERY_ROUTE = pytest.mark.parametrize("route", ["auto", *ROUTES])

X, W, V, U, T = (draw(4, seed=seed) for seed in range(5))


def wave(x: Tensor, w: Tensor) -> Tensor:
    return torch.sin(w @ x)


def product(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """H v in closed form."""
    return -torch.sin(w @ x) * (w @ v) * w


def curvature_gradients() -> dict[str, Tensor]:
    """Derivatives of uᵀ H(x, w) v = −sin(w·x) (w·u) (w·v) by each of its arguments."""
    s, u, v = W @ X, W @ U, W @ V
    return {
        "x": -torch.cos(s) * u * v * W,
        "w": -torch.cos(s) * u * v * X - torch.sin(s) * (v * U + u * V),
        "v": -torch.sin(s) * u * W,
    }


@EVERY_ROUTE
@pytest.mark.parametrize("in_dims", [(0, None, None), (None, 0, None), (None, None, 0), (0, 0, 0), (1, None, 1)])
def test_vmap_of_hvp_matches_closed_form(in_dims: tuple[int | None, ...], route: str) -> None:
    inputs = [
        value if dim is None else draw(*((3, 4) if dim == 0 else (4, 3)), seed=7 + i)
        for i, (value, dim) in enumerate(zip((X, W, V), in_dims, strict=True))
    ]
    actual = vmap(lambda x, w, v: hvp(wave, x, v, w, route=route), in_dims)(*inputs)
    torch.testing.assert_close(actual, vmap(product, in_dims)(*inputs))


@EVERY_ROUTE
def test_nested_vmap_of_hvp_matches_closed_form(route: str) -> None:
    points, directions = draw(3, 4), draw(2, 4, seed=1)
    actual = vmap(lambda x: vmap(lambda v: hvp(wave, x, v, W, route=route))(directions))(points)
    expected = torch.stack([torch.stack([product(x, W, v) for v in directions]) for x in points])
    torch.testing.assert_close(actual, expected)


@EVERY_ROUTE
def test_hvp_of_vmap_matches_closed_form(route: str) -> None:
    """The Hessian of a sum over samples is block diagonal."""
    points, directions = draw(3, 4), draw(3, 4, seed=1)
    actual = hvp(lambda xs: vmap(wave, (0, None))(xs, W).sum(), points, directions, route=route)
    torch.testing.assert_close(actual, vmap(product, (0, None, 0))(points, W, directions))


@EVERY_ROUTE
def test_vmap_over_an_ensemble_matches_members(route: str) -> None:
    """Parameter dicts stacked along a leading axis give one product for each member."""
    case = named("mlp")
    members = [case.inputs(seed=seed)[0] for seed in range(3)]
    _, args = case.inputs()
    v = case.vector()
    stacked = {name: torch.stack([member[name] for member in members]) for name in v}
    actual = vmap(lambda x: hvp(case.function, x, v, *args, route=route))(stacked)
    for i, member in enumerate(members):
        expected = hvp(case.function, member, v, *args)
        torch.testing.assert_close({name: leaf[i] for name, leaf in actual.items()}, expected)


@EVERY_ROUTE
@pytest.mark.parametrize(("argument", "argnum"), [("x", 0), ("w", 1), ("v", 2)])
def test_grad_of_hvp_matches_closed_form(argument: str, argnum: int, route: str) -> None:
    def curvature(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return U @ hvp(wave, x, v, w, route=route)

    torch.testing.assert_close(grad(curvature, argnum)(X, W, V), curvature_gradients()[argument])


@EVERY_ROUTE
@pytest.mark.parametrize("argument", ["x", "w", "v"])
def test_backward_of_hvp_matches_closed_form(argument: str, route: str) -> None:
    inputs = {"x": X.clone(), "w": W.clone(), "v": V.clone()}
    inputs[argument].requires_grad_()
    outcome = hvp(wave, inputs["x"], inputs["v"], inputs["w"], route=route)
    assert outcome.requires_grad
    (U @ outcome).backward()
    torch.testing.assert_close(inputs[argument].grad, curvature_gradients()[argument])
    assert all(inputs[other].grad is None for other in {"x", "w", "v"} - {argument})


@EVERY_ROUTE
def test_gradient_of_hvp_by_a_closed_over_tensor_matches(route: str) -> None:
    w = W.clone().requires_grad_()
    (U @ hvp(lambda x: wave(x, w), X, V, route=route)).backward()
    torch.testing.assert_close(w.grad, curvature_gradients()["w"])
    by_grad = grad(lambda weight: U @ hvp(lambda x: wave(x, weight), X, V, route=route))(W)
    torch.testing.assert_close(by_grad, curvature_gradients()["w"])


@EVERY_ROUTE
def test_gradients_reach_the_graph_of_the_point(route: str) -> None:
    """Gradients reach the graph that made x and v: D²f(2w)[w, u] for the cubic Σy³ is 12 Σ w² u."""
    w = W.clone().requires_grad_()
    (U @ hvp(lambda y: (y**3).sum(), 2 * w, w, route=route)).backward()
    torch.testing.assert_close(w.grad, 24 * W * U)


@EVERY_ROUTE
def test_closed_over_graph_can_be_differentiated_again(route: str) -> None:
    """The caller can still differentiate a closed-over graph, with or without a graph of the product."""
    w = W.clone().requires_grad_()
    scale = (w**2).sum()

    def f(y: Tensor) -> Tensor:
        return scale * (y**3).sum()

    with torch.no_grad():
        hvp(f, X, V, route=route)
        hessian_matrix(f, X, route=route)
    hvp(f, X, V, route=route).sum().backward(retain_graph=True)
    torch.testing.assert_close(w.grad, 2 * W * (6 * X * V).sum())
    w.grad = None
    scale.backward()
    torch.testing.assert_close(w.grad, 2 * W)


@EVERY_ROUTE
def test_point_that_is_also_closed_over_is_constant_to_the_product(route: str) -> None:
    """A closed-over tensor is a constant to the product, and an input to later derivatives."""
    w = W.clone().requires_grad_()
    outcome = hvp(lambda y: (y**2 * w).sum(), w, V, route=route)
    torch.testing.assert_close(outcome.detach(), 2 * W * V)
    outcome.sum().backward()
    torch.testing.assert_close(w.grad, 2 * V)


@EVERY_ROUTE
def test_backward_through_vmap_reaches_outer_tensors(route: str) -> None:
    """Gradients of products inside vmap reach tensors outside of it."""
    points, w = torch.stack([X, U]).requires_grad_(), W.clone().requires_grad_()
    vmap(lambda x: hvp(lambda y: (y**3 * w).sum(), x, V, route=route))(points).sum().backward()
    torch.testing.assert_close(points.grad, (6 * W * V).expand(2, 4))
    torch.testing.assert_close(w.grad, (6 * points.detach() * V).sum(0))
    points.grad = None
    vmap(lambda x: hessian_matrix(lambda y: (y**3).sum(), x, route=route))(points).sum().backward()
    torch.testing.assert_close(points.grad, torch.full((2, 4), 6.0, dtype=torch.float64))


@EVERY_ROUTE
def test_inference_tensors_are_accepted(route: str) -> None:
    with torch.inference_mode():
        x, w, v = X.clone(), W.clone(), V.clone()
    torch.testing.assert_close(hvp(wave, x, v, w, route=route), product(X, W, V))
    torch.testing.assert_close(hessian_matrix(wave, x, w, route=route) @ V, product(X, W, V))


@EVERY_ROUTE
def test_fourth_derivative_by_autograd_matches(route: str) -> None:
    """Two more gradients by autograd: D⁴f[v, v, u, ·] = sin(s) (w·v)² (w·u) w."""
    x = X.clone().requires_grad_()
    (first,) = torch.autograd.grad(V @ hvp(wave, x, V, W, route=route), x, create_graph=True)
    (second,) = torch.autograd.grad(U @ first, x)
    torch.testing.assert_close(second, torch.sin(W @ X) * (W @ V) ** 2 * (W @ U) * W)


@EVERY_ROUTE
def test_hvp_of_hvp_matches_closed_form(route: str) -> None:
    actual = hvp(lambda x: V @ hvp(wave, x, V, W, route=route), X, U, route=route)
    torch.testing.assert_close(actual, torch.sin(W @ X) * (W @ V) ** 2 * (W @ U) * W)


@EVERY_ROUTE
def test_jvp_of_hvp_matches_closed_form(route: str) -> None:
    value, tangent = jvp(lambda x: hvp(wave, x, V, W, route=route), (X,), (T,))
    torch.testing.assert_close(value, product(X, W, V))
    torch.testing.assert_close(tangent, -torch.cos(W @ X) * (W @ V) * (W @ T) * W)


@EVERY_ROUTE
def test_hvp_inside_a_dual_level_matches_or_raises(route: str) -> None:
    """hvp works inside a user's dual level; forward routes raise, because torch cannot nest another level."""
    with forward_ad.dual_level():
        x = forward_ad.make_dual(X, T)
        if "forward" in route:
            with pytest.raises(RouteError, match=route):
                hvp(wave, x, V, W, route=route)
            return
        value, tangent = forward_ad.unpack_dual(hvp(wave, x, V, W, route=route))
    torch.testing.assert_close(value, product(X, W, V))
    torch.testing.assert_close(tangent, -torch.cos(W @ X) * (W @ V) * (W @ T) * W)


@EVERY_ROUTE
@pytest.mark.parametrize("transform", [jacrev, jacfwd])
def test_jacobian_of_hvp_matches_closed_form(transform, route: str) -> None:
    in_x = transform(lambda x: hvp(wave, x, V, W, route=route))(X)
    torch.testing.assert_close(in_x, -torch.cos(W @ X) * (W @ V) * torch.outer(W, W))
    in_v = transform(lambda v: hvp(wave, X, v, W, route=route))(V)
    torch.testing.assert_close(in_v, -torch.sin(W @ X) * torch.outer(W, W))


@EVERY_ROUTE
def test_hvp_respects_no_grad_and_inference_mode(route: str) -> None:
    expected = product(X, W, V)
    leaf = X.clone().requires_grad_()
    assert not hvp(wave, X, V, W, route=route).requires_grad
    with torch.no_grad():
        outcome = hvp(wave, leaf, V, W, route=route)
    torch.testing.assert_close(outcome, expected)
    assert not outcome.requires_grad
    with torch.inference_mode():
        torch.testing.assert_close(hvp(wave, X, V, W, route=route), expected)
        made_here = X.clone()
        torch.testing.assert_close(hvp(wave, made_here, V, W, route=route), expected)
    torch.testing.assert_close(hvp(wave, leaf, V, W, route=route), expected)


@EVERY_ROUTE
def test_dense_derivatives_respect_no_grad_and_inference_mode(route: str) -> None:
    expected = -torch.sin(W @ X) * torch.outer(W, W)
    leaf = X.clone().requires_grad_()
    dense = {
        "hessian": lambda x: hessian(wave, route=route)(x, W),
        "hessian_matrix": lambda x: hessian_matrix(wave, x, W, route=route),
        "hessian_diagonal": lambda x: hessian_diagonal(wave, route=route)(x, W),
    }
    for name, transform in dense.items():
        truth = expected.diagonal() if name == "hessian_diagonal" else expected
        assert not transform(X).requires_grad, name
        assert transform(leaf).requires_grad, name
        with torch.no_grad():
            outcome = transform(leaf)
        torch.testing.assert_close(outcome, truth)
        assert not outcome.requires_grad, name
        with torch.inference_mode():
            torch.testing.assert_close(transform(X), truth)


@EVERY_ROUTE
@pytest.mark.parametrize("chunk_size", ["auto", None, 3])
def test_vmap_of_dense_derivatives_matches(chunk_size: int | str | None, route: str) -> None:
    points = draw(3, 4)
    options = {"route": route, "chunk_size": chunk_size}
    expected = torch.stack([-torch.sin(W @ x) * torch.outer(W, W) for x in points])
    torch.testing.assert_close(vmap(lambda x: hessian(wave, **options)(x, W))(points), expected)
    torch.testing.assert_close(vmap(lambda x: hessian_matrix(wave, x, W, **options))(points), expected)
    diagonals = vmap(lambda x: hessian_diagonal(wave, **options)(x, W))(points)
    torch.testing.assert_close(diagonals, expected.diagonal(dim1=1, dim2=2))


@pytest.mark.one_in(3)
@EVERY_ROUTE
@pytest.mark.parametrize("chunk_size", ["auto", 3])
def test_third_derivatives_through_dense_hessians_match(chunk_size: int | str, route: str) -> None:
    """∇ (uᵀ H v) by grad, by .backward() and under vmap; ∇ tr H from the diagonal."""
    options = {"route": route, "chunk_size": chunk_size}
    expected = curvature_gradients()["x"]

    def through_matrix(x: Tensor) -> Tensor:
        return U @ hessian_matrix(wave, x, W, **options) @ V

    def through_blocks(x: Tensor) -> Tensor:
        return U @ hessian(wave, **options)(x, W) @ V

    def trace(x: Tensor) -> Tensor:
        return hessian_diagonal(wave, **options)(x, W).sum()

    of_trace = -torch.cos(W @ X) * (W @ W) * W
    for function, truth in ((through_matrix, expected), (through_blocks, expected), (trace, of_trace)):
        torch.testing.assert_close(grad(function)(X), truth)
        torch.testing.assert_close(vmap(grad(function))(X.expand(2, 4)), truth.expand(2, 4))
        torch.testing.assert_close(jvp(function, (X,), (T,))[1], truth @ T)
        leaf = X.clone().requires_grad_()
        function(leaf).backward()
        torch.testing.assert_close(leaf.grad, truth)


def quartic(x: Tensor) -> Tensor:
    """(x·x)², with the Hessian 4 (x·x) I + 8 x xᵀ."""
    return (x @ x) ** 2


def quartic_third(x: Tensor, v: Tensor) -> Tensor:
    """D³f[v] of `quartic` in closed form."""
    cross = torch.outer(x, v)
    return 8 * ((x @ v) * torch.eye(len(x), dtype=x.dtype) + cross + cross.T)


DENSE: dict[str, Callable[[Tensor], Tensor]] = {
    "hessian": hessian(quartic),
    "hessian in groups": hessian(quartic, chunk_size=3),
    "matrix": lambda x: hessian_matrix(quartic, x),
    "jacobian": jacobian(grad(quartic), mode="reverse"),
    "diagonal": hessian_diagonal(quartic),
    "laplacian": laplacian(quartic),
    "laplacian in groups": laplacian(quartic, chunk_size=3),
    "dense laplacian": laplacian(quartic, sparse=False),
}


# torch.func.linearize makes parts of a graph without its modules, on purpose.
FOLDS = pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")


@FOLDS
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in {"matrix", "dense laplacian"} else pytest.mark.slow) for name in DENSE],
)
def test_linearized_dense_derivatives_match_closed_form(name: str) -> None:
    """`torch.func.linearize` folds constants of its graph before the graph writes into them."""
    _, push = linearize(DENSE[name], X)
    expected = quartic_third(X, V)
    if name == "diagonal":
        expected = expected.diagonal()
    elif "laplacian" in name:
        expected = expected.trace()
    torch.testing.assert_close(push(V), expected)


@FOLDS
def test_jvp_of_a_hessian_along_many_directions_matches_closed_form() -> None:
    """Groups of 32 directions and more have kernels of their own, which read memory that wrapped tensors lack."""
    x, v = draw(64, seed=5), draw(64, seed=6)

    def f(flat: Tensor) -> Tensor:
        # Of a product with a unit direction, the kernels pick a column.
        w = flat.view(8, 8)
        return ((torch.ones(3, 8, dtype=x.dtype) @ w) ** 3).sum()

    expected = 18 * torch.kron(torch.ones(8, 8, dtype=x.dtype), torch.diag(v.view(8, 8).sum(0)))
    torch.testing.assert_close(jvp(hessian(f), (x,), (v,))[1], expected)
    torch.testing.assert_close(linearize(hessian(f), x)[1](v), expected)


def third_order_cases() -> list[Any]:
    return [
        pytest.param(case, id=case.name)
        for case in CASES
        # A constant Hessian has no graph.
        if case.smooth and case.name not in {"quadratic", "affine", "fourier_power", "in_place"}
    ]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("case", third_order_cases())
def test_third_derivatives_match_differences(case: Case) -> None:
    """D³f[v, v, v] through a product and through a dense Hessian, against differences of function values."""
    x, args = case.inputs()
    f, flat, v = flat_function(case, x, args), ravel(x), ravel(case.vector())
    (expected,), (error,) = third_differences(f, flat, v[None])
    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "product": lambda point: hvp(f, point, v) @ v,
        "matrix": lambda point: v @ hessian_matrix(f, point) @ v,
        "blocks": lambda point: v @ hessian(f)(point) @ v,
    }
    for name, curvature in ways.items():
        leaf = flat.clone().requires_grad_()
        curvature(leaf).backward()
        for slope in (grad(curvature)(flat), leaf.grad):
            gap = (slope @ v - expected).abs().item()
            assert gap <= 10 * error + 1e-6 * max(1.0, expected.abs().item()), name
