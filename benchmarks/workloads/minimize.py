"""Whole runs of `hodiff.optimize.minimize` and of SciPy's, with derivatives by hand in NumPy or by torch.autograd."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import scipy.optimize as so
import torch
from torch import Tensor

import hodiff
from benchmarks.problems import Problem
from benchmarks.race import Contestant

D = torch.float64


def problems(quick: bool) -> Iterator[Problem]:
    """Yield logistic regression, limited by arithmetic, and Rosenbrock's function, limited by overhead per call."""
    yield _logistic(1_000 if quick else 10_000, 20 if quick else 200)
    yield _rosenbrock(100 if quick else 1_000, 20 if quick else 40)


def _logistic(count: int, n: int) -> Problem:
    """Return the mean logistic loss with a small ridge, minimized from zero."""
    draw = np.random.default_rng(0)
    X, w = draw.standard_normal((count, n)), draw.standard_normal(n) / n**0.5
    labels = (draw.random(count) < 1 / (1 + np.exp(-X @ w))).astype(float)
    signs, ridge = 2 * labels - 1, 1e-3

    def value(w: np.ndarray) -> float:
        return float(np.logaddexp(0, -signs * (X @ w)).mean() + ridge / 2 * w @ w)

    def gradient(w: np.ndarray) -> np.ndarray:
        shares = 1 / (1 + np.exp(signs * (X @ w)))
        return X.T @ (-signs * shares) / count + ridge * w

    def product(w: np.ndarray, v: np.ndarray) -> np.ndarray:
        p = 1 / (1 + np.exp(-X @ w))
        return X.T @ (p * (1 - p) * (X @ v)) / count + ridge * v

    inputs, targets = torch.from_numpy(X), torch.from_numpy(labels)

    def loss(w: Tensor) -> Tensor:
        return torch.nn.functional.binary_cross_entropy_with_logits(inputs @ w, targets) + ridge / 2 * w @ w

    title = f"Logistic regression, {count:,} × {n}, trust-ncg to the minimum"
    return _problem("logistic", title, loss, np.zeros(n), {}, value=value, gradient=gradient, product=product)


def _rosenbrock(n: int, steps: int) -> Problem:
    """Return the first steps on Rosenbrock's function from zero."""

    def f(x: Tensor) -> Tensor:
        return (100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum()

    title = f"Rosenbrock's function, n = {n:,}, {steps} steps of trust-ncg"
    by_hand = {"value": so.rosen, "gradient": so.rosen_der, "product": so.rosen_hess_prod}
    return _problem("rosenbrock", title, f, np.zeros(n), {"maxiter": steps}, **by_hand)


class _Autograd:
    """Derivatives for SciPy by `torch.autograd`; the gradient's graph at a point is kept for products there."""

    def __init__(self, f: Callable[[Tensor], Tensor]):
        self.f, self.at = f, np.empty(0)

    def _record(self, x: np.ndarray) -> None:
        if not np.array_equal(self.at, x):
            self.at, self.x = x.copy(), torch.from_numpy(x.copy()).requires_grad_()
            self.value = self.f(self.x)
            (self.gradient,) = torch.autograd.grad(self.value, self.x, create_graph=True)

    def value_and_gradient(self, x: np.ndarray) -> tuple[float, np.ndarray]:
        """Compute value and gradient from one recording."""
        self._record(x)
        return self.value.item(), self.gradient.detach().numpy()

    def product(self, x: np.ndarray, v: np.ndarray) -> np.ndarray:
        """Compute a Hessian-vector product by a backward pass through the gradient."""
        self._record(x)
        (found,) = torch.autograd.grad(self.gradient, self.x, torch.from_numpy(v.copy()), retain_graph=True)
        return found.numpy()


def _problem(
    name: str,
    title: str,
    f: Callable[[Tensor], Tensor],
    start: np.ndarray,
    options: dict[str, Any],
    *,
    value: Callable[..., Any],
    gradient: Callable[..., Any],
    product: Callable[..., Any],
) -> Problem:
    x0 = torch.from_numpy(start)

    def by_hand() -> float:
        found = so.minimize(value, start, jac=gradient, hessp=product, method="trust-ncg", options=options)
        return float(found.fun)

    def by_autograd() -> float:
        way = _Autograd(f)
        found = so.minimize(
            way.value_and_gradient, start, jac=True, hessp=way.product, method="trust-ncg", options=options
        )
        return float(found.fun)

    def by_hodiff() -> float:
        return float(hodiff.optimize.minimize(f, x0, options=options).fun)

    expected = by_hand()
    return Problem(
        name=name,
        title=title,
        contestants=[
            Contestant("SciPy, derivatives by hand in NumPy", "unit", by_hand),
            Contestant("SciPy, derivatives by torch.autograd", "torch", by_autograd),
            Contestant("hodiff.optimize.minimize", "hodiff", by_hodiff),
        ],
        error=lambda found: abs(found - expected) / abs(expected),
        tolerance=1e-6,
    )
