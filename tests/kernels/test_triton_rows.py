"""Tests of Triton's passes over rows of logits against formulas in float64; without a GPU, in Triton's interpreter."""

import math

import pytest
import torch
from drawing import draw_each

from hodiff.kernels.cross_entropy import gpu

triton = pytest.importorskip("triton")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (torch.cuda.is_available() or triton.knobs.runtime.interpret),
        reason="no GPU, and triton without interpreter",
    ),
]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS, COLUMNS, FIRST, IGNORE = 5, 11, 4, -100
# One target in the tile at each end, one ignored, and one on each side of the tile.
TARGET = torch.tensor([4, IGNORE, 14, 3, 15])[:, None]
HERE = torch.tensor([True, False, True, False, False])[:, None]


@pytest.fixture(autouse=True)
def on_this_device(monkeypatch):
    monkeypatch.setattr(gpu, "DEVICES", [DEVICE])


def drawn():
    """Draw logits, their tangent, and a matrix with numbers for each row; some logits are extreme."""
    z, z_t, numbers = (each.float() for each in draw_each((ROWS, COLUMNS), (ROWS, COLUMNS), (ROWS, 8)))
    z[1], z[2, 0], z[3, :10] = z[1] - 300, 90.0, -math.inf
    return z, z_t, numbers


def target():
    return gpu.Target(TARGET.to(DEVICE), IGNORE, FIRST)


def one_hot():
    return torch.zeros(ROWS, COLUMNS).scatter(1, torch.where(HERE, TARGET - FIRST, 0), HERE.float()).double()


def moved(*tensors):
    return [each.to(DEVICE) for each in tensors]


def assert_near(found, exact, tolerance=3e-6):
    assert found.shape == exact.shape
    torch.testing.assert_close(
        found.cpu().double(), exact, rtol=tolerance, atol=tolerance * exact[exact.isfinite()].abs().max().item()
    )


@pytest.mark.parametrize("smoothed", [False, True])
def test_terms(smoothed):
    z, z_t, _ = drawn()
    z[3, :10] = -30.0  # so that sums are finite
    exact = z.double(), z_t.double()
    lse = exact[0].logsumexp(1, keepdim=True)
    mean = (exact[0].softmax(1) * exact[1]).sum(1, keepdim=True)
    for found, first, numbers in (
        (gpu.terms(*moved(z), None, None, target(), smoothed), lse, exact[0]),
        (gpu.terms(*moved(z, z_t, lse.float()), target(), smoothed), mean, exact[1]),
    ):
        hit = (one_hot() * numbers).sum(1, keepdim=True)
        expected = [first, hit, *([numbers.sum(1, keepdim=True)] if smoothed else [])]
        for i, each in enumerate(expected):
            assert_near(found[:, i : i + 1], each)


@pytest.mark.filterwarnings("ignore:All-NaN")  # by the interpreter
@pytest.mark.parametrize("value", [-math.inf, math.inf, math.nan])
@pytest.mark.parametrize("whole", [False, True], ids=["one number", "a row"])
def test_log_sum_exp_of_non_finite_logits_is_torchs(value, whole):
    z, _, _ = drawn()
    z[0, 2 : 12 if whole else 3] = value
    if whole:
        z[0] = value
    found = gpu.terms(*moved(z), None, None, target(), smoothed=False)[:, :1]
    torch.testing.assert_close(found.cpu(), z.logsumexp(1, keepdim=True), equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("smoothed", [False, True])
def test_cotangent(dtype, smoothed):
    z, _, numbers = drawn()
    lse = z.double().logsumexp(1, keepdim=True)
    g = numbers[:, :3]
    expected = g[:, :1].double() * (z.double() - lse).exp() + one_hot() * g[:, 1:2] + smoothed * g[:, 2:]
    (logits,) = moved(z)
    found = gpu.cotangent(logits, *moved(lse.float(), g), target(), smoothed, dtype)
    assert found.dtype == dtype
    # Numbers in float32 take the memory of the logits; others leave the logits unchanged.
    assert (found.data_ptr() == logits.data_ptr()) == (dtype is torch.float32)
    assert dtype is torch.float32 or torch.equal(logits.cpu(), z)
    assert_near(found, expected, max(2e-5, torch.finfo(dtype).eps))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("smoothed", "moves", "needed"), [(False, False, True), (False, True, False), (True, True, True)]
)
def test_curvature(dtype, smoothed, moves, needed):
    z, z_t, numbers = drawn()
    lse = z.double().logsumexp(1, keepdim=True)
    g, g_t, mean = numbers[:, :3], numbers[:, 3:6] if moves else None, numbers[:, 6:7]
    p = (z.double() - lse).exp()
    expected = g[:, :1].double() * p + one_hot() * g[:, 1:2] + smoothed * g[:, 2:]
    expected_t = p * (g[:, :1].double() * z_t.double() - mean)
    if g_t is not None:
        expected_t = expected_t + one_hot() * g_t[:, 1:2] + smoothed * g_t[:, 2:]
    moving = None if g_t is None else g_t.to(DEVICE)
    z, z_t, lse, g, mean = moved(z, z_t, lse.float(), g, mean)
    found, found_t = gpu.curvature(z, z_t, lse, (g, moving), mean, target(), smoothed, dtype, needed)
    tolerance = max(2e-5, torch.finfo(dtype).eps)
    assert (found is not None) == needed
    if found is not None:
        assert_near(found, expected, tolerance)
    assert_near(found_t, expected_t, tolerance)


@pytest.mark.parametrize(
    "tile",
    [torch.zeros(3, 4).T, torch.zeros(2, 3, 4), torch.zeros(3, 4).bfloat16(), torch.zeros(1, 4).expand(3, 4),
     torch.zeros(0, 4), torch.zeros(3, 4, requires_grad=True)],
    ids=["turned", "a batch", "16 bits", "expanded", "empty", "recorded"],
)  # fmt: skip
def test_kernels_reject_unsupported_tiles(tile):
    assert gpu.takes(torch.zeros(3, 4, device=DEVICE))
    assert not gpu.takes(tile.to(DEVICE))


def test_other_devices_take_operators(monkeypatch):
    monkeypatch.setattr(gpu, "DEVICES", ["cuda"])
    assert not gpu.takes(torch.zeros(3, 4))
