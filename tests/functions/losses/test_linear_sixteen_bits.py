"""Tests of the cross-entropy of linear logits in 16 bits, on devices that multiply 16 bits with sums in float32."""

import pytest
import torch
import torch.nn.functional as F
from drawing import draw_each
from functions.losses.test_linear_cross_entropy import use_tiles

from hodiff.functions import linear_cross_entropy
from hodiff.kernels import products_in_float32
from hodiff.kernels.cross_entropy import cpu, gpu

SAMPLES, SIZE, CLASSES = 16, 8, 24
TARGET = torch.arange(SAMPLES) * 5 % CLASSES
TARGET[3] = -100


@pytest.fixture
def products(monkeypatch):
    """Let the CPU stand for a GPU: it multiplies 16 bits with sums in float32. Record the factors' dtypes."""
    found = []

    def multiply(a, b):
        found.append(a.dtype)
        assert a.dtype is b.dtype
        return a.float() @ b.float()

    units = {("cpu", dtype): rounds for (_, dtype), rounds in products_in_float32.UNITS.items()}
    monkeypatch.setattr(products_in_float32, "UNITS", units)
    monkeypatch.setattr(products_in_float32, "multiply", multiply)
    use_tiles(monkeypatch, samples=7, classes=16)
    return found


@pytest.fixture(params=["operators", pytest.param("Triton's kernels", marks=pytest.mark.slow)])
def by(request, monkeypatch):
    """Replace the CPU's kernels by operators, or by Triton's in its interpreter."""
    monkeypatch.setattr(cpu, "takes", lambda *tiles: False)
    if request.param != "operators":
        triton = pytest.importorskip("triton")
        if not triton.knobs.runtime.interpret:
            pytest.skip("triton without interpreter")
        monkeypatch.setattr(gpu, "DEVICES", ["cpu"])
        assert gpu.takes(torch.zeros(1, 1))
    return request.param


def drawn(dtype):
    """Draw hidden states and weight, and a direction."""
    return [each.to(dtype) for each in draw_each(*((SAMPLES, SIZE), (CLASSES, SIZE)) * 2)]


def derivatives(loss, x, w, x_t, w_t):
    leaves = [each.detach().requires_grad_() for each in (x, w)]
    gradients = torch.autograd.grad(loss(*leaves), leaves, create_graph=True)
    return [*(each.detach() for each in gradients), *torch.autograd.grad(gradients, leaves, [x_t, w_t])]


def composition(options):
    def loss(x, w):
        z = x @ w.T
        if options.get("softcap"):
            z = options["softcap"] * torch.tanh(z / options["softcap"])
        return F.cross_entropy(z, TARGET, label_smoothing=options.get("label_smoothing", 0.0))

    return loss


def test_units_are_those_of_cuda():
    """bfloat16 rounds computed factors; float16, which would make zeros of small ones, does not."""
    if torch.version.hip is None:
        assert {("cuda", torch.bfloat16): True, ("cuda", torch.float16): False} == products_in_float32.UNITS


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"softcap": 1.5}], ids=["plain", "smooth", "capped"])
def test_derivatives_have_the_digits_of_float32_sums(dtype, options, by, products):
    inputs = drawn(dtype)
    exact = derivatives(composition(options), *(each.double() for each in inputs))
    found = derivatives(lambda x, w: linear_cross_entropy(x, w, TARGET, **options), *inputs)
    assert set(products) == {dtype}
    for a, b in zip(found, exact, strict=True):
        assert a.dtype is dtype
        # Rounding the result alone changes it by a quarter of eps, in the mean.
        assert (a.double() - b).norm() <= 0.6 * torch.finfo(dtype).eps * b.norm()


def test_computed_factors_of_float16_stay_in_float32(products):
    """In the mean over many samples, cotangents are below the range of float16."""
    x, w, *_ = drawn(torch.float16)
    leaves = x.requires_grad_(), w.requires_grad_()
    loss = linear_cross_entropy(*leaves, TARGET)
    before = len(products)
    found = torch.autograd.grad(loss * 1e-4, leaves)
    tiles = -(-SAMPLES // 7) * -(-CLASSES // 16)
    assert len(products) - before == tiles  # those of logits alone
    precise = [each.detach().double().requires_grad_() for each in leaves]
    exact = torch.autograd.grad(F.cross_entropy(precise[0] @ precise[1].T, TARGET), precise)
    # Results are rounded to the steps of the smallest numbers of float16.
    for a, b in zip(found, exact, strict=True):
        torch.testing.assert_close(a.double(), b * 1e-4, rtol=2**-11, atol=1.01 * 2**-25)


def test_two_passes_more_keep_products_of_the_second_order_exact(products):
    """A gradient of x that was rounded to 16 bits is not used in its own tangent."""
    x, w, x_t, w_t = drawn(torch.bfloat16)
    derivatives(lambda x, w: linear_cross_entropy(x, w, TARGET), x, w, x_t, w_t)
    tiles = -(-SAMPLES // 7) * -(-CLASSES // 16)
    # Logits 1; gradient 3; tangent 3; tangent of the gradient 7.
    assert len(products) == 14 * tiles


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_other_devices_multiply_in_float32(device):
    a = torch.ones(2, 3, dtype=torch.bfloat16, device=device)
    assert products_in_float32.factor(a).dtype is torch.float32
    assert products_in_float32.product(a, a.mT).dtype is torch.float32


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_cuda_sums_products_in_float32(dtype):
    a, b = (each.to("cuda", dtype) for each in draw_each((64, 512), (512, 48)))
    found = products_in_float32.product(a, b)
    torch.testing.assert_close(found.double(), a.double() @ b.double(), rtol=1e-5, atol=1e-4)
