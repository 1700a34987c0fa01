"""Tests of attention with Triton kernels through the public function, on a GPU or in Triton's interpreter."""

import pytest
import torch

from hodiff.errors import HodiffWarning
from hodiff.functions import attention
from hodiff.functions.attention import backends

pytest.importorskip("triton")
pytestmark = pytest.mark.gpu
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def calls(monkeypatch):
    """Run the Triton kernels on tensors of any device, and record the names of the called functions."""
    kernels, counted = backends.triton_kernels(), []
    for name in ("value", "tangent", "gradient", "gradient_tangent"):
        function = getattr(kernels, name)
        monkeypatch.setattr(
            kernels, name, lambda *args, name=name, function=function: (counted.append(name), function(*args))[1]
        )
    monkeypatch.setattr(backends, "on_cpu", backends.on_gpu)
    return counted


def drawn():
    generator = torch.Generator().manual_seed(0)
    wide = (
        torch.float64 if backends.triton_kernels().takes(*torch.zeros(3, 1, 1, dtype=torch.float64)) else torch.float32
    )
    return [torch.randn(2, 5, 4, generator=generator, dtype=torch.float64).to(DEVICE, wide) for _ in range(6)]


def every_derivative(f):
    q, k, v, *directions = drawn()
    leaves = [x.requires_grad_() for x in (q, k, v)]
    y = f(*leaves)
    first = torch.autograd.grad(y.square().sum(), leaves, create_graph=True)
    second = torch.autograd.grad(first, leaves, directions)
    constants = tuple(x.detach() for x in leaves)
    return [y, *first, *second, torch.func.jvp(f, constants, tuple(directions))[1]]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"is_causal": True, "softcap": 2.0}], ids=str)
def test_every_derivative_matches_primitives(options, calls):
    def primitives(q, k, v):
        scores = q @ k.mT / 2
        if options:
            scores = 2 * torch.tanh(scores / 2)
            scores = scores.masked_fill(~torch.ones(5, 5, dtype=torch.bool, device=DEVICE).tril(), -torch.inf)
        return torch.softmax(scores, -1) @ v

    found, expected = every_derivative(lambda *x: attention(*x, **options)), every_derivative(primitives)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12 if a.dtype == torch.float64 else 1e-4)
    assert set(calls) == {"value", "tangent", "gradient", "gradient_tangent"}


def test_failing_kernel_warns_and_falls_back_to_operators(calls, monkeypatch):
    def fail(*args):
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(backends.triton_kernels(), "value", fail)
    q, k, v, *_ = drawn()
    with pytest.warns(HodiffWarning, match="does not use Triton's kernels: RuntimeError: no such instruction"):
        y = attention(q, k, v)
    torch.testing.assert_close(y, torch.softmax(q @ k.mT / 2, -1) @ v)
