"""Tests of the narrow kernels against torch's own, at shapes inside and outside their range."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from hodiff.kernels.narrow import (
    KERNELS,
    NARROW,
    NarrowKernels,
    batched_product,
    log_softmax_derivative,
    product,
    softmax_derivative,
)

aten = torch.ops.aten
sizes = st.integers(0, 2 * NARROW + 1)
dtypes = st.sampled_from([torch.float32, torch.float64, torch.bfloat16])


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)


@given(batch=st.integers(0, 5), rows=sizes, inner=sizes, columns=sizes, shared=st.booleans(), dtype=dtypes)
@example(batch=2, rows=0, inner=0, columns=0, shared=True, dtype=torch.float32)
def test_batched_product_matches_torch(batch, rows, inner, columns, shared, dtype):
    a = draw(rows, inner, dtype=dtype).expand(batch, rows, inner) if shared else draw(batch, rows, inner, dtype=dtype)
    b = draw(batch, columns, inner, dtype=dtype).transpose(1, 2)
    torch.testing.assert_close(batched_product(a, b), torch.bmm(a, b), rtol=1e-4, atol=1e-4)


@given(rows=st.integers(0, 600), inner=sizes, columns=sizes, transposed=st.booleans(), dtype=dtypes)
@example(rows=256, inner=0, columns=4, transposed=False, dtype=torch.float32)
def test_product_matches_torch(rows, inner, columns, transposed, dtype):
    a = draw(rows, inner, dtype=dtype)
    b = draw(columns, inner, dtype=dtype).t() if transposed else draw(inner, columns, dtype=dtype)
    torch.testing.assert_close(product(a, b), torch.mm(a, b), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("ours", "by_torch", "activation"),
    [
        (log_softmax_derivative, aten._log_softmax_backward_data, torch.log_softmax),
        (softmax_derivative, aten._softmax_backward_data, torch.softmax),
    ],
)
@given(shape=st.lists(st.integers(1, NARROW + 2), min_size=1, max_size=3), data=st.data(), dtype=dtypes)
def test_softmax_derivatives_match_torch(ours, by_torch, activation, shape, data, dtype):
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    cotangent = draw(*shape, dtype=dtype)
    output = activation(3 * draw(*shape, dtype=dtype), dim)
    if data.draw(st.booleans()):
        output = output[:1].expand(shape)
    expected = by_torch(cotangent, output, dim, dtype)
    torch.testing.assert_close(ours(cotangent, output, dim, dtype), expected, rtol=1e-4, atol=1e-5)


def test_mode_intercepts_operators_of_autograd(monkeypatch):
    called = []

    def spied(operator, kernel):
        return lambda *args: called.append(operator.name()) or kernel(*args)

    for operator, kernel in KERNELS.items():
        monkeypatch.setitem(KERNELS, operator, spied(operator, kernel))
    x = draw(64, 3).requires_grad_()
    with NarrowKernels():
        x.log_softmax(1).square().sum().backward()
    expected = x.grad.clone()
    x.grad = None
    x.log_softmax(1).square().sum().backward()
    assert called == ["aten::_log_softmax_backward_data"]
    torch.testing.assert_close(x.grad, expected)


def test_products_of_nan_are_nan():
    a, b = torch.full((NARROW * NARROW, 2), torch.nan), torch.ones(2, 3)
    assert product(a, b).isnan().all()
    assert batched_product(a.expand(4, -1, -1), b.expand(4, 2, 3).contiguous()).isnan().all()
