"""Linearized operators of attention hold nothing of the size of its weights, eager or compiled."""

import gc

import pytest
import torch
from memory_use import LiveMemory
from plain_attention import plain_attention

from hodiff.functions import attention
from hodiff.operators import GaussNewtonOperator, HessianOperator
from hodiff.operators.compiled import product_graphs as graphs
from hodiff.rules import blockwise

SIZE = 8


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Use blocks of 16 rows, and run captured graphs uncompiled, so that each operation is counted."""
    monkeypatch.setattr(blockwise, "BLOCK", 1)
    monkeypatch.setattr(graphs, "compile_graph", lambda graph, inputs, **options: graph)


def problem(length, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(length, SIZE, generator=generator, dtype=dtype)
    weights = torch.randn(3, SIZE, SIZE, generator=generator, dtype=dtype) / SIZE**0.5
    return x, weights, torch.randn(3, SIZE, SIZE, generator=generator, dtype=dtype)


def hessian(attend, x, weights, **options):
    def loss(w, x):
        return attend(*(x @ w), is_causal=True).sin().mean()

    return HessianOperator(loss, weights, x, **options)


def gauss_newton(attend, x, weights, **options):
    def model(w, x):
        return attend(*(x @ w), is_causal=True)

    return GaussNewtonOperator(model, lambda y, _: y.cosh().mean(), weights, x, x, **options)


OPERATORS = [hessian, gauss_newton]


def peak_bytes(operator, attend, length, **options):
    """Return the peak number of bytes for a linearization and two products."""
    x, weights, v = problem(length)
    gc.collect()
    with LiveMemory() as counted:
        A = operator(attend, x, weights, **options)
        A @ v
        A @ v
    return counted.peak


def assert_linear(operator, **options):
    short, middle, long = (peak_bytes(operator, attention, length, **options) for length in (512, 1024, 2048))
    # Quadratic memory would grow fourfold at twice the length.
    assert middle < 2.5 * short
    assert long < 2.5 * middle
    assert long < 4 * 2048**2 / 2


@pytest.mark.slow
@pytest.mark.parametrize("operator", OPERATORS)
def test_eager_operators_take_linear_memory(operator):
    assert_linear(operator)


@pytest.mark.slow
@pytest.mark.parametrize("operator", OPERATORS)
def test_compiled_operators_take_linear_memory(operator):
    assert_linear(operator, compile=True)


@pytest.mark.slow
@pytest.mark.parametrize("compile", [False, True])
def test_plain_attention_takes_quadratic_memory(compile):
    """Plain attention takes quadratic memory, so the tests above can fail."""
    assert peak_bytes(hessian, plain_attention, 256, compile=compile) > 3 * peak_bytes(
        hessian, plain_attention, 128, compile=compile
    )


@pytest.mark.one_in(2)
@pytest.mark.parametrize("operator", OPERATORS)
def test_compiled_products_match_plain_attention(operator):
    x, weights, v = problem(40, torch.float64)
    expected = operator(plain_attention, x, weights) @ v
    block = torch.stack([v.reshape(-1), x[:24].reshape(-1)], 1)
    A = operator(attention, x, weights, compile=True)
    torch.testing.assert_close(A @ v, expected, rtol=1e-11, atol=1e-13)
    # A block of vectors uses the batching rule of the operator in the graph.
    torch.testing.assert_close((A @ block)[:, 0], expected.reshape(-1), rtol=1e-11, atol=1e-13)
    theirs = operator(plain_attention, x, weights) @ block
    torch.testing.assert_close(A @ block, theirs, rtol=1e-11, atol=1e-13)
