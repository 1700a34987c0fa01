"""Tests of the cross-entropy of linear logits with the kernels for tiles of logits, and without them."""

import math

import pytest
import torch
from drawing import draw_each
from functions.losses.test_linear_cross_entropy import (
    INPUTS,
    OPTIONS,
    TARGET,
    all_derivatives,
    assert_same,
    fused_loss,
    reference,
    use_tiles,
)

from hodiff.kernels import fused
from hodiff.kernels.cross_entropy import cpu

built = pytest.mark.skipif(not fused.available(), reason="the kernels were not built")


@pytest.fixture
def calls(monkeypatch):
    """Record the names of the called kernels."""
    found = []
    for name in ("cotangent_", "curvature_"):
        kernel = getattr(cpu, name)
        monkeypatch.setattr(cpu, name, lambda *args, kernel=kernel, name=name: (found.append(name), kernel(*args))[1])
    return found


@pytest.mark.one_in(18)
@pytest.mark.parametrize("by", ["kernels", "operators"])
@pytest.mark.parametrize("name", OPTIONS)
def test_derivatives_match_primitives_by_every_route(name, by, calls, monkeypatch):
    """Tiles of two classes, most without a target, and a last tile of one class give the correct derivatives."""
    use_tiles(monkeypatch, samples=5, classes=2)
    if by == "operators":
        monkeypatch.setattr(cpu, "takes", lambda *tiles: False)
    options = OPTIONS[name]
    target = TARGET.clamp(min=0) if "ignore_index" in options else TARGET
    assert_same(
        all_derivatives(fused_loss(target, **options), INPUTS), all_derivatives(reference(target, **options), INPUTS)
    )
    # Operators handle smoothing with unequal class weights, except for the probabilities if there is no soft-cap.
    expected = {"weighted and smoothed": {"cotangent_"}, "all": set()}.get(name, {"cotangent_", "curvature_"})
    assert set(calls) == (expected if by == "kernels" and fused.available() else set())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "smoothed", "capped"])
def test_float32_matches_float64(name, monkeypatch):
    use_tiles(monkeypatch, samples=5, classes=8)
    target = torch.arange(7) * 3
    inputs = tuple(each.float() for each in draw_each((7, 2), (20, 2), (20,)))
    exact = all_derivatives(reference(target, **OPTIONS[name]), tuple(each.double() for each in inputs))
    found = all_derivatives(fused_loss(target, **OPTIONS[name]), inputs)
    assert_same([each.double() for each in found], exact, tolerance=2e-5)


@built
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("columns", [1, 7, 300])
def test_kernel_results_match_for_extreme_logits(columns, dtype):
    """The kernels accept per-row numbers of any strides, and very small, hidden and non-finite logits."""
    rows = 23
    z, z_t = (each.to(dtype) for each in draw_each((rows, columns), (rows, columns)))
    z[2], z[3, 0], z[4, 0] = z[2] - 200, -math.inf, math.nan
    lse, g, mean, t, r, t_t, r_t = (draw_each((rows, 14))[0].to(dtype)[:, 2 * i : 2 * i + 1] for i in range(7))
    lse = lse + 5
    place = torch.arange(rows)[:, None] % (columns + 1) - 1
    p = torch.exp(z.double() - lse.double())
    hit = torch.zeros_like(p).scatter(1, place.clamp(min=0), (place >= 0).double())
    expected = g * p + r + hit * t, p * (g * z_t - mean) + r_t + hit * t_t
    alone = cpu.cotangent_(z.clone(), lse, g, t, r, place)
    found = cpu.curvature_(z.clone(), z_t.clone(), lse, g, mean, (t, t_t), (r, r_t), place)
    for a, b in zip((alone, *found), (expected[0], *expected), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=0, atol=8 * torch.finfo(dtype).eps, equal_nan=True)
    again = cpu.curvature_(z.clone(), z_t.clone(), lse, g, mean, (t, t_t), (r, r_t), place)
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(found, again, strict=True))
    without = cpu.curvature_(z.clone(), z_t.clone(), lse, g, mean, (None, None), (None, None), place)
    torch.testing.assert_close(without[1].double(), p * (g * z_t - mean), rtol=0, atol=8 * torch.finfo(dtype).eps,
                               equal_nan=True)  # fmt: skip


@built
@pytest.mark.parametrize(
    "tile",
    [torch.zeros(3, 4).T, torch.zeros(2, 3, 4), torch.zeros(3, 4).bfloat16(), torch.zeros(1, 4).expand(3, 4)],
    ids=["turned", "a batch", "16 bits", "expanded"],
)
def test_kernels_reject_unsupported_tiles(tile):
    assert not cpu.takes(tile)


@pytest.mark.slow
@built
def test_inputs_are_left_unchanged(monkeypatch):
    """The kernels overwrite logits and accumulate in place, but do not change the inputs."""
    use_tiles(monkeypatch)
    before = [each.clone() for each in INPUTS]
    all_derivatives(fused_loss(**OPTIONS["smoothed"]), INPUTS)
    assert all(torch.equal(a, b) for a, b in zip(INPUTS, before, strict=True))
