"""Value, gradient and product together: closed forms, differences, SciPy, transforms, and one run of the function."""

import warnings
from typing import Any

import pytest
import torch
from cases import CASES, Case, ravel
from cases import case as named
from derivatives.oracles import assert_same_structure, extrapolate, flat_function, reference, route_table
from derivatives.test_transforms import EVERY_ROUTE, U, V, W, X, curvature_gradients, product, wave
from drawing import draw
from scipy import optimize
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vmap

import hodiff
from hodiff import ROUTES, grad_and_hvp, value_grad_hvp


def wave_gradient(x: Tensor, w: Tensor) -> Tensor:
    return torch.cos(w @ x) * w


@pytest.mark.one_in(6)
@pytest.mark.parametrize(("case", "route"), route_table(("auto", *ROUTES)))
def test_value_gradient_and_hvp_match_reference(case: Case, route: str) -> None:
    x, args = case.inputs()
    v = case.vector()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hodiff.HodiffWarning)
        value, gradient, product = value_grad_hvp(case.function, x, v, *args, route=route)
    torch.testing.assert_close(value, case.function(x, *args))
    assert_same_structure(gradient, x)
    assert_same_structure(product, x)
    known = reference(case.name)
    known.check(ravel(product), known.hessian @ ravel(v), scale=ravel(v).abs().sum().item())
    f, at = flat_function(case, x, args), ravel(x)
    slope, error = extrapolate(lambda h: (f(at + h * ravel(v)) - f(at - h * ravel(v))) / (2 * h), 0.05)
    tolerance = max(10 * error.item(), 1e-9 * max(1.0, slope.abs().item()))
    torch.testing.assert_close(ravel(gradient) @ ravel(v), slope, rtol=0, atol=tolerance)
    if case.gradient is not None:
        exact = torch.from_numpy(case.gradient(x, args))
        torch.testing.assert_close(ravel(gradient), exact, rtol=1e-11, atol=1e-11)


def test_rosenbrock_matches_scipy() -> None:
    x, v = torch.linspace(-1.2, 1.5, 12).double(), torch.linspace(1, -2, 12).double()
    value, gradient, product = value_grad_hvp(named("rosenbrock").function, x, v)
    assert value.item() == pytest.approx(optimize.rosen(x.numpy()), rel=1e-13)
    torch.testing.assert_close(gradient, torch.from_numpy(optimize.rosen_der(x.numpy())), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(product, torch.from_numpy(optimize.rosen_hess_prod(x.numpy(), v.numpy())))


@pytest.mark.parametrize("route", [*ROUTES[:3], "auto"])
def test_function_runs_once(route: str) -> None:
    calls = 0

    def f(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return (x**3).sum()

    value_grad_hvp(f, X, V, route=route)
    assert calls == 1
    grad_and_hvp(f, X, V, route=route)
    assert calls == 2


def test_dropout_and_batch_norm_run_once() -> None:
    """Value and gradient have the same mask, and buffers are updated once."""
    net = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 1)).double()
    x = {name: each.detach() for name, each in net.named_parameters()}
    inputs = draw(6, 4)
    values = []

    def f(p: Any) -> Tensor:
        values.append(functional_call(net, p, (inputs,)).square().mean())
        return values[-1]

    value, gradient, _ = value_grad_hvp(f, x, x)
    assert int(net[1].num_batches_tracked) == 1
    assert value.equal(values[0].detach())
    # Euler's theorem: f is quadratic in the last layer.
    scaled = sum((gradient[name] * x[name]).sum() for name in ("3.weight", "3.bias"))
    torch.testing.assert_close(scaled, 2 * value)


@EVERY_ROUTE
def test_has_aux_returns_aux(route: str) -> None:
    def f(x: Tensor, shift: float) -> tuple[Tensor, dict[str, Tensor]]:
        y = (x + shift) ** 3
        return y.sum(), {"cubes": y}

    value, gradient, product, aux = value_grad_hvp(f, X, V, 0.5, route=route, has_aux=True)
    torch.testing.assert_close(value, ((X + 0.5) ** 3).sum())
    torch.testing.assert_close(gradient, 3 * (X + 0.5) ** 2)
    torch.testing.assert_close(product, 6 * (X + 0.5) * V)
    torch.testing.assert_close(aux["cubes"], (X + 0.5) ** 3)
    short = grad_and_hvp(f, X, V, 0.5, route=route, has_aux=True)
    assert all(a.equal(b) for a, b in zip(short[:2], (gradient, product), strict=True))
    assert not any(each.requires_grad for each in (value, gradient, product, aux["cubes"]))


@EVERY_ROUTE
def test_vmap_matches_closed_form(route: str) -> None:
    points, directions = draw(3, 4, seed=8), draw(3, 4, seed=9)
    found = vmap(lambda x, v: value_grad_hvp(wave, x, v, W, route=route))(points, directions)
    torch.testing.assert_close(found[0], vmap(wave, (0, None))(points, W))
    torch.testing.assert_close(found[1], vmap(wave_gradient, (0, None))(points, W))
    torch.testing.assert_close(found[2], vmap(product, (0, None, 0))(points, W, directions))


@EVERY_ROUTE
def test_third_derivatives_of_all_results_match(route: str) -> None:
    """Derivatives by point, direction and argument are right by torch.func, by backward and in forward mode."""

    def each(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        value, gradient, second = value_grad_hvp(wave, x, v, w, route=route)
        return torch.stack([value, U @ gradient, U @ second])

    third, s = curvature_gradients(), W @ X
    expected = {
        "x": torch.stack([wave_gradient(X, W), -torch.sin(s) * (W @ U) * W, third["x"]]),
        "w": torch.stack([torch.cos(s) * X, torch.cos(s) * U - torch.sin(s) * (W @ U) * X, third["w"]]),
        "v": torch.stack([torch.zeros(4).double(), torch.zeros(4).double(), third["v"]]),
    }
    by_func = torch.func.jacrev(each, (0, 1, 2))(X, W, V)
    torch.testing.assert_close(dict(zip("xwv", by_func, strict=True)), expected)
    leaves = [leaf.clone().requires_grad_() for leaf in (X, W, V)]
    results = each(*leaves)
    rows = [torch.autograd.grad(r, leaves, retain_graph=True, allow_unused=True) for r in results]
    for name, column in zip("xwv", zip(*rows, strict=True), strict=True):
        torch.testing.assert_close(
            torch.stack([torch.zeros(4).double() if g is None else g for g in column]), expected[name]
        )
    _, tangent = jvp(lambda x: each(x, W, V), (X,), (U,))
    torch.testing.assert_close(tangent, expected["x"] @ U)


def test_gradients_reach_closed_over_tensors() -> None:
    w = W.clone().requires_grad_()
    value, gradient, second = value_grad_hvp(lambda x: wave(x, w), X, V)
    (by_w,) = torch.autograd.grad(value + U @ gradient + U @ second, w)
    expected = grad(lambda w: wave(X, w) + U @ wave_gradient(X, w) + U @ product(X, w, V))(W)
    torch.testing.assert_close(by_w, expected)


@pytest.mark.parametrize("route", ["auto", "forward-over-reverse"])
def test_results_own_their_memory(route: str) -> None:
    """Results own their memory: a value that is x itself, an expanded gradient, and an ignored leaf."""
    x = {"a": X.clone(), "b": X.clone()}
    value, gradient, second = value_grad_hvp(lambda p: p["a"].sum(), x, x, route=route)
    for tensor in (*gradient.values(), *second.values()):
        tensor.mul_(2).add_(1)
    assert value.equal(X.sum())
    assert gradient["a"].equal(torch.full_like(X, 3))
    assert gradient["b"].equal(torch.ones_like(X))
    at = torch.tensor(3.0)
    value, _, _ = value_grad_hvp(lambda x: x, at, at, route=route)
    value.add_(1)
    assert at.item() == 3


def test_works_in_no_grad_and_inference_mode() -> None:
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            found = value_grad_hvp(wave, X, V, W)
        torch.testing.assert_close(found, (wave(X, W), wave_gradient(X, W), product(X, W, V)))


def test_correct_false_matches_torch() -> None:
    norm = torch.nn.functional.layer_norm
    f = lambda x: norm(x, (4,)).pow(3).sum()  # noqa: E731
    for route in ("reverse-over-reverse", "forward-over-reverse"):
        theirs = value_grad_hvp(f, X, V, route=route, correct=False)
        torch.testing.assert_close(theirs, value_grad_hvp(f, X, V, route=route))


def test_errors_name_the_function() -> None:
    for function in (value_grad_hvp, grad_and_hvp):
        name = function.__name__
        with pytest.raises(hodiff.InputError, match=f"{name}: route: expected one of 'auto', .*got 'sideways'"):
            function(wave, X, V, W, route="sideways")
        with pytest.raises(hodiff.InputError, match=f"{name}: .* one real number"):
            function(lambda x: x, X, V)
        with pytest.raises(hodiff.InputError, match=f"{name}: .*does not depend"):
            function(lambda x: torch.ones(()), X, V)
        with pytest.raises(hodiff.InputError, match=name):
            function(wave, X, V[:2], W)


@pytest.mark.parametrize("case", [each for each in CASES if each.missing_in_torch], ids=lambda each: each.name)
def test_route_missing_in_torch_raises(case: Case) -> None:
    x, args = case.inputs()
    for route in case.missing_in_torch:
        with pytest.raises(hodiff.RouteError, match=route):
            value_grad_hvp(case.function, x, case.vector(), *args, route=route, correct=False)


@pytest.mark.one_in(5)
@EVERY_ROUTE
def test_compiled_matches_closed_form(route: str) -> None:
    torch.compiler.reset()
    function = torch.compile(
        lambda x, v: value_grad_hvp(wave, x, v, W, route=route), fullgraph=True, backend="aot_eager"
    )
    torch.testing.assert_close(function(X, V), (wave(X, W), wave_gradient(X, W), product(X, W, V)))
    torch.testing.assert_close(function(U, V), (wave(U, W), wave_gradient(U, W), product(U, W, V)))
