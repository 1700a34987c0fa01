"""Tests of the rounding errors of attention relative to torch's own kernels, against float64 primitives."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from functions.attention.oracle import by_primitives, normal
from torch.nn.attention import SDPBackend, sdpa_kernel

from hodiff.functions import attention
from hodiff.kernels import fused

# Ratio of norms of errors; the largest ratio over q, k and v counts.
WORSE = 1.5


def by_torch(backend):
    def way(q, k, v):
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v)

    return way


FLASH, MATH = by_torch(SDPBackend.FLASH_ATTENTION), by_torch(SDPBackend.MATH)


def value(way, x):
    return (way(*x).detach(),)


def gradient(way, x):
    return torch.autograd.grad(way(*x).square().sum(), x)


def product(way, x):
    first = torch.autograd.grad(way(*x).square().sum(), x, create_graph=True)
    return torch.autograd.grad(first, x, [each.detach() for each in x])


def drawn(dtype, rows, keys):
    return tuple(normal(1, 1, n, 64, seed=i).to(dtype).requires_grad_() for i, n in enumerate((rows, keys, keys)))


def error(step, way, x):
    exact = step(by_primitives, tuple(each.detach().double().requires_grad_() for each in x))
    return max(float((a.double() - b).norm() / b.norm()) for a, b in zip(step(way, x), exact, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("step", "way"), [(value, FLASH), (gradient, FLASH), (product, MATH)])
def test_errors_do_not_exceed_those_of_torch(step, way, dtype):
    x = drawn(dtype, 256, 512)
    assert error(step, attention, x) <= WORSE * error(step, way, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("step", [value, gradient, product])
@pytest.mark.parametrize("cap", [3.0, 1e3, 1e5, 1e8])
def test_soft_caps_far_above_all_scores_keep_precision(cap, step, dtype):
    """Far below the cap, c tanh(x / c) is x up to rounding, and its derivative is 1."""
    capped, x = partial(attention, softcap=cap), drawn(dtype, 40, 70)
    exact = step(partial(by_primitives, softcap=cap), tuple(each.detach().double().requires_grad_() for each in x))
    for a, b in zip(step(capped, x), exact, strict=True):
        assert float((a.double() - b).norm() / b.norm()) < 10 * torch.finfo(dtype).eps


@pytest.mark.skipif(not fused.available(), reason="the kernels were not built")
@pytest.mark.parametrize("step", [value, gradient, product])
@pytest.mark.parametrize(("rows", "keys"), [(32, 8192), (8192, 32)])
def test_float32_sums_over_many_keys_and_queries_keep_precision(step, rows, keys):
    """Sums over many keys, and over many queries, are nearly as accurate as torch's."""
    x = drawn(torch.float32, rows, keys)
    assert error(step, attention, x) <= WORSE * error(step, MATH, x)
