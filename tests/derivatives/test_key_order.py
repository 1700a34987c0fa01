"""Dicts with the keys of x in another order are refused, or used by key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from drawing import draw

import hodiff
from hodiff.implicit import anderson, fixed_point, linear_solve, newton, odeint, picard, root

A, B = draw(2), draw(2, seed=1)
X = {"a": A, "b": B}
TIMES = torch.tensor([0.0, 0.1], dtype=torch.float64)


def turned(tree: Any) -> Any:
    """Return a dict with its keys in reverse order."""
    return {key: tree[key] for key in reversed(tree)}


def loss(x: Any) -> Any:
    return (x["a"].pow(3) * x["b"].exp()).sum()


def outputs(x: Any) -> Any:
    return {"u": x["a"].sin() * x["b"], "t": x["b"].square()}


def swapped(x: Any) -> Any:
    """Return a linear function of the dict whose result has other keys first."""
    return {"b": x["a"] + 3 * x["b"], "a": 2 * x["a"] + x["b"]}


def contraction(x: Any, p: Any) -> Any:
    return {"b": x["a"].sin() / 4 + p, "a": x["b"].cos() / 4}


# Functions of two trees, of which the second has other keys first, or whose function returns such a tree.
REFUSED: dict[str, Callable[[], Any]] = {
    **{f"hvp, {r}": lambda r=r: hodiff.hvp(loss, X, turned(X), route=r) for r in hodiff.ROUTES},
    "hvp, x": lambda: hodiff.hvp(loss, turned(X), X),
    "grad_and_hvp": lambda: hodiff.grad_and_hvp(loss, X, turned(X)),
    "value_grad_hvp": lambda: hodiff.value_grad_hvp(loss, X, turned(X)),
    "directional_derivatives": lambda: hodiff.directional_derivatives(loss, X, turned(X), order=2),
    "jet": lambda: hodiff.taylor.jet(loss, (X,), ((X, turned(X)),)),
    "HessianOperator": lambda: hodiff.HessianOperator(loss, X) @ turned(X),
    "transposed": lambda: hodiff.JacobianOperator(outputs, X).T @ turned(outputs(X)),
    **{f"odeint, {m}": lambda m=m: odeint(lambda t, y: swapped(y), X, TIMES, memory=m) for m in ("steps", "adjoint")},
    "root": lambda: root(contraction, newton())(X, A),
    "picard": lambda: fixed_point(contraction, picard())(X, A),
    "anderson": lambda: fixed_point(contraction, anderson())(X, A),
    "linear_solve": lambda: linear_solve(swapped, X),
}
BY_KEY: dict[str, Callable[[Any], Any]] = {
    "hvp": lambda x: hodiff.hvp(loss, x, x),
    "jacobian": lambda x: hodiff.jacobian(outputs)(x)["u"],
    "hessian": lambda x: hodiff.hessian(loss)(x)["a"],
    "HessianOperator": lambda x: hodiff.HessianOperator(loss, x) @ x,
}


@pytest.mark.parametrize("name", REFUSED)
def test_trees_with_other_keys_first_are_refused(name: str) -> None:
    with pytest.raises(hodiff.InputError, match=r"in another order|structure of"):
        REFUSED[name]()


@pytest.mark.parametrize("name", BY_KEY)
def test_results_belong_to_their_keys(name: str) -> None:
    one, other = BY_KEY[name](X), BY_KEY[name](turned(X))
    assert list(other) == ["b", "a"]
    for key in one:
        torch.testing.assert_close(other[key], one[key])
