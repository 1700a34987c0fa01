"""Functions whose random numbers or state differ between groups of directions: draws are replayed, or hodiff raises."""

import random

import numpy as np
import pytest
import torch
from torch import nn

import hodiff

D = torch.float64
X = torch.tensor([0.5, 1.0, 2.0], dtype=D)
GENERATOR = torch.Generator()
NUMPY, PYTHON = np.random.default_rng(0), random.Random(0)

# Random factors from generators that torch.func.vmap does not control
SOURCES = {
    "private generator": lambda: torch.rand((), generator=GENERATOR, dtype=D),
    "NumPy": lambda: 0.5 + np.random.rand(),  # noqa: NPY002
    "NumPy's generator": lambda: 0.5 + NUMPY.random(),
    "Python": lambda: 0.5 + random.random(),
    "Python's generator": lambda: 0.5 + PYTHON.random(),
}
FORWARD = ("forward-over-reverse", "reverse-over-forward", "forward-over-forward")


@pytest.mark.parametrize("source", SOURCES)
def test_jacobian_uses_one_draw_for_all_columns(source):
    draw = SOURCES[source]
    J, factor = hodiff.jacobian(
        lambda x: (x * (factor := draw()), torch.as_tensor(factor, dtype=D)),
        mode="forward", chunk_size=1, randomness="same", has_aux=True,
    )(X)  # fmt: skip
    assert torch.equal(J, factor * torch.eye(3, dtype=D))


@pytest.mark.parametrize("route", FORWARD)
@pytest.mark.parametrize("source", SOURCES)
def test_hessian_uses_one_draw_for_all_rows(source, route):
    draw = SOURCES[source]
    H, factor = hodiff.hessian(
        lambda x: ((x**2).sum() * (factor := draw()), torch.as_tensor(factor, dtype=D)),
        route=route, chunk_size=1, randomness="same", has_aux=True,
    )(X)  # fmt: skip
    assert torch.allclose(H, 2 * factor * torch.eye(3, dtype=D))


def test_hvp_uses_one_draw_for_all_chunks():
    x = torch.ones(3000, dtype=D)
    for draw in SOURCES.values():
        product = hodiff.hvp(lambda x, draw=draw: (x**2).sum() * draw(), x, x, route="forward-over-forward")
        assert torch.equal(product, product[0].expand(3000))


@pytest.mark.parametrize("source", [name for name in SOURCES if name != "private generator"])
def test_several_draws_without_randomness_same_are_rejected(source):
    draw = SOURCES[source]
    with pytest.raises(hodiff.InputError, match="jacobian: f: expected the same value in each call"):
        hodiff.jacobian(lambda x: x * draw(), mode="forward", chunk_size=1)(X)
    for route in FORWARD:
        with pytest.raises(hodiff.InputError, match="hessian: f: expected the same value in each call"):
            hodiff.hessian(lambda x: (x**2).sum() * draw(), route=route, chunk_size=1)(X)


def test_changing_state_is_rejected():
    calls = []

    def f(x):
        calls.append(1)
        return len(calls) * x**2

    for options in ({}, {"randomness": "same"}):
        with pytest.raises(hodiff.InputError, match="expected the same value in each call"):
            hodiff.jacobian(f, mode="forward", chunk_size=1, **options)(X)
    assert hodiff.jacobian(f, mode="reverse", chunk_size=1)(X).diagonal().div(X).unique().numel() == 1


def test_dropout_is_drawn_once_with_randomness_same():
    dropout = nn.Dropout(0.5)
    x = torch.ones(40, dtype=D)
    J = hodiff.jacobian(dropout, mode="forward", chunk_size=7, randomness="same")(x)
    assert set(J.diagonal().tolist()) == {0.0, 2.0}
    diagonal = hodiff.hessian_diagonal(
        lambda x: dropout(x).pow(2).sum(), route="forward-over-reverse", chunk_size=7, randomness="same"
    )(x)
    assert set(diagonal.tolist()) == {0.0, 8.0}


def test_make_fx_traces_the_jacobian():
    from torch.fx.experimental.proxy_tensor import make_fx

    for mode in ("real", "fake"):
        graph = make_fx(hodiff.jacobian(torch.sin, mode="forward", chunk_size=1), tracing_mode=mode)(X)
        assert torch.allclose(graph(2 * X), torch.diag((2 * X).cos()))


def by_autocast(layer, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return layer(x).float()


def by_casts(layer, x):
    return nn.functional.linear(x.bfloat16(), layer.weight.bfloat16(), layer.bias.bfloat16()).float()


@pytest.mark.parametrize("lowered", [by_autocast, by_casts])
@pytest.mark.parametrize("route", hodiff.ROUTES)
def test_low_precision_inside_is_not_taken_for_changing_state(lowered, route):
    torch.manual_seed(0)
    layer = torch.nn.Linear(3, 3)
    matrix, bias = layer.weight.detach().clone(), layer.bias.detach().clone()
    x, v = torch.randn(3), torch.randn(3)

    def f(x):
        return lowered(layer, x).pow(3).sum()

    product = hodiff.hvp(f, x, v, route=route)
    expected = matrix.T @ (6 * (matrix @ x + bias) * (matrix @ v))
    torch.testing.assert_close(product.detach(), expected, rtol=0.05, atol=0.05)
    state = iter(range(100))
    if route == "forward-over-forward":
        with pytest.raises(hodiff.InputError, match="expected the same value in each call"):
            hodiff.hvp(lambda x: f(x) * (1 + next(state)), x, v, route=route)
