"""Tests of hypergradients of ridge regression against its closed form, and of their warnings."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from drawing import draw
from torch import Tensor

from hodiff import HodiffWarning, InputError, RouteError
from hodiff.meta import SGD, NonFiniteError, hypergradient

X, Y, NEW_X, NEW_Y = draw(12, 4), draw(12, seed=1), draw(9, 4, seed=2), draw(9, seed=3)
WEIGHTS = torch.tensor([0.3, -0.5, 0.1, 0.2], dtype=torch.float64)


def inner(w: Tensor, log_weights: Tensor) -> Tensor:
    return (X @ w - Y).square().mean() + (log_weights.exp() * w.square()).sum()


def outer(w: Tensor, log_weights: Tensor) -> Tensor:
    return (NEW_X @ w - NEW_Y).square().mean() + 0.1 * log_weights.square().sum()


def minimum(log_weights: Tensor) -> Tensor:
    return torch.linalg.solve(X.T @ X / 12 + torch.diag(log_weights.exp()), X.T @ Y / 12)


def closed_form() -> Tensor:
    return torch.func.grad(lambda log_weights: outer(minimum(log_weights), log_weights))(WEIGHTS)


SETTINGS: dict[str, dict[str, Any]] = {
    "implicit-cg": {},
    "neumann": {"iterations": 2000, "tolerance": 1e-9},
    "nystrom": {"iterations": 4, "damping": 1e-9},
    "unroll": {"steps": 400, "optimizer": SGD(0.1)},
}


@pytest.mark.parametrize("method", SETTINGS)
def test_ridge_matches_closed_form(method: str) -> None:
    start = torch.zeros(4, dtype=torch.float64) if method == "unroll" else minimum(WEIGHTS)
    generator = torch.Generator().manual_seed(0)
    result = hypergradient(outer, inner, start, WEIGHTS, method, generator=generator, **SETTINGS[method])
    error = (result.value - closed_form()).norm()
    assert error < 1e-6 * closed_form().norm()
    assert not result.value.requires_grad
    torch.testing.assert_close(result.params, minimum(WEIGHTS), rtol=1e-6, atol=1e-6)
    assert result.outer == pytest.approx(outer(minimum(WEIGHTS), WEIGHTS).item())
    assert result.residual < 1e-6
    assert result.outer_error < 1e-6
    assert result.products >= 4


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("implicit-cg", {"iterations": 2}),
        ("neumann", {"iterations": 4}),
        ("neumann", {"iterations": 10, "tolerance": 0.0}),
        ("nystrom", {"iterations": 3, "damping": 0.05, "tolerance": 0.0}),
        ("unroll", {"steps": 12, "optimizer": SGD(0.1)}),
    ],
)
def test_error_estimate_has_the_size_of_the_error(method: str, options: dict[str, Any]) -> None:
    start = torch.zeros(4, dtype=torch.float64) if method == "unroll" else minimum(WEIGHTS)
    options = {"generator": torch.Generator().manual_seed(0), **options}
    if method == "unroll":
        result = hypergradient(outer, inner, start, WEIGHTS, method, **options)
    else:
        with pytest.warns(HodiffWarning, match=f"{method} left a relative residual"):
            result = hypergradient(outer, inner, start, WEIGHTS, method, **options)
    # The reference is the derivative of the exact minimum, so the effect of damping counts as an error.
    error = (result.value - closed_form()).norm().item()
    assert error > 1e-8
    assert error / 6 < result.error_estimate < 6 * error


def test_nystrom_with_few_of_many_columns_matches_and_reports_a_small_residual() -> None:
    features = draw(60, 50, seed=3)

    def ridge(w: Tensor, log_weight: Tensor) -> Tensor:
        return (features @ w - 1).square().mean() + log_weight.exp() * w.square().sum()

    def sum_of_minimum(log_weight: Tensor) -> Tensor:
        H = features.T @ features / 60 + log_weight.exp() * torch.eye(50, dtype=torch.float64)
        return torch.linalg.solve(H, features.mean(0)).sum()

    weight = torch.tensor(-3.0, dtype=torch.float64)
    H = features.T @ features / 60 + weight.exp() * torch.eye(50, dtype=torch.float64)
    w = torch.linalg.solve(H, features.mean(0))
    generator = torch.Generator().manual_seed(0)
    result = hypergradient(lambda w, _: w.sum(), ridge, w, weight, "nystrom", generator=generator)
    torch.testing.assert_close(result.value, torch.func.grad(sum_of_minimum)(weight), rtol=1e-5, atol=0)
    assert result.residual < 1e-6


def damped(damping: float) -> Tensor:
    w = minimum(WEIGHTS)
    H = torch.func.hessian(inner)(w, WEIGHTS) + damping * torch.eye(4, dtype=torch.float64)
    mixed = torch.func.jacrev(torch.func.grad(inner), argnums=1)(w, WEIGHTS)
    direct = torch.func.grad(outer, argnums=1)(w, WEIGHTS)
    return direct - mixed.T @ torch.linalg.solve(H, torch.func.grad(outer)(w, WEIGHTS))


def test_damped_value_matches_the_damped_hessian() -> None:
    result = hypergradient(outer, inner, minimum(WEIGHTS), WEIGHTS, damping=0.05)
    torch.testing.assert_close(result.value, damped(0.05))


def test_pytrees_with_unused_leaves_match() -> None:
    def split(w):
        return {"a": w[:1], "b": [w[1:]]}

    def join(tree):
        return torch.cat([tree["a"], *tree["b"]])

    hyper = {"log": WEIGHTS, "other": torch.ones(2, dtype=torch.float64)}
    result = hypergradient(
        lambda p, h: outer(join(p), h["log"]), lambda p, h: inner(join(p), h["log"]), split(minimum(WEIGHTS)), hyper
    )
    torch.testing.assert_close(result.value["log"], closed_form())
    assert not result.value["other"].any()
    assert set(result.params) == {"a", "b"}


def test_point_that_is_no_minimum_warns() -> None:
    with pytest.warns(HodiffWarning, match="params is not at the minimum of inner"):
        result = hypergradient(outer, inner, minimum(WEIGHTS) + 0.1, WEIGHTS)
    change = outer(minimum(WEIGHTS), WEIGHTS) - outer(minimum(WEIGHTS) + 0.1, WEIGHTS)
    assert result.outer_error == pytest.approx(abs(change.item()), rel=0.5)


def test_indefinite_hessian_warns() -> None:
    def saddle(w, h):
        return (w[0] ** 2 - w[1] ** 2) * h.exp() + 0 * h

    w, h = torch.zeros(2, dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    with pytest.warns(HodiffWarning, match="residual"):
        hypergradient(lambda w, h: w.sum() + 1 + h, saddle, w, h)


def test_no_grad_and_parameters_that_require_grad_are_accepted() -> None:
    w, hyper = minimum(WEIGHTS).requires_grad_(), WEIGHTS.clone().requires_grad_()
    with torch.no_grad():
        result = hypergradient(outer, inner, w, hyper)
    torch.testing.assert_close(result.value, closed_form())
    assert w.grad is None
    assert hyper.grad is None


W = minimum(WEIGHTS)
BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "outer": (lambda: hypergradient(3, inner, W, WEIGHTS), "outer: expected a callable"),
    "inner": (lambda: hypergradient(outer, None, W, WEIGHTS), "inner: expected a callable"),
    "method": (lambda: hypergradient(outer, inner, W, WEIGHTS, "guess"), "method: expected one of 'unroll'"),
    "iterations": (lambda: hypergradient(outer, inner, W, WEIGHTS, iterations=0), "iterations"),
    "steps": (lambda: hypergradient(outer, inner, W, WEIGHTS, "unroll", steps=0), "steps"),
    "in a transform": (
        lambda: torch.func.grad(lambda h: hypergradient(outer, inner, W, h).value.sum())(WEIGHTS),
        "expected a call outside of torch.func transforms",
    ),
    "damping": (lambda: hypergradient(outer, inner, W, WEIGHTS, "nystrom", damping=-0.1), "damping"),
    "params": (lambda: hypergradient(outer, inner, 3, WEIGHTS), "params"),
    "hyper": (lambda: hypergradient(outer, inner, W, {"a": torch.tensor(1)}), r"hyper\['a'\]"),
    "vector": (lambda: hypergradient(lambda w, h: w, inner, W, WEIGHTS), r"outer: .*\(4,\) float64"),
    "constant": (lambda: hypergradient(lambda w, h: w.detach().sum(), inner, W, WEIGHTS), "outer: expected a loss"),
    "inner without params": (
        lambda: hypergradient(outer, lambda w, h: h.sum(), W, WEIGHTS),
        "inner: expected a loss that depends on params",
    ),
    "outer without params": (
        lambda: hypergradient(lambda w, h: h.sum(), inner, W, WEIGHTS),
        "outer: expected a loss that depends on params",
    ),
    "no path": (
        lambda: hypergradient(lambda w, h: w.sum(), lambda w, h: (w - 1).square().sum(), W * 0 + 1, WEIGHTS),
        "hyperparameters that the outer loss can reach",
    ),
    "no unrolled path": (
        lambda: hypergradient(lambda w, h: w.sum(), lambda w, h: w.square().sum(), W, WEIGHTS, "unroll", steps=2),
        "outer: expected a loss that (hyper can reach|depends)",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_rejects_bad_arguments(case: str) -> None:
    call, match = BAD[case]
    with pytest.raises((InputError, RouteError), match=match):
        call()


def test_non_finite_results_raise() -> None:
    with pytest.raises(NonFiniteError, match="step"):
        hypergradient(outer, inner, W, WEIGHTS, "unroll", steps=400, optimizer=SGD(1e3))
    with pytest.raises(NonFiniteError, match="not finite"):
        hypergradient(lambda w, h: w.sum() * torch.nan, inner, W, WEIGHTS)


def test_error_at_a_saddle_is_unknown() -> None:
    h = torch.tensor([1.0, -1.0], dtype=torch.float64)
    phi = torch.tensor([1.0, 2.0], dtype=torch.float64)
    saddle = lambda w, phi: (h * (w - phi) ** 2).sum() / 2  # noqa: E731
    with pytest.warns(HodiffWarning, match="left a relative residual"):
        result = hypergradient(lambda w, phi: (w * torch.tensor([1.0, 2.0])).sum(), saddle, phi.clone(), phi)
    assert result.error_estimate > 1 or (result.value - torch.tensor([1.0, 2.0])).norm() < 1e-6
