"""Tests of derivatives with respect to an additive mask in the CPU kernels, against primitives, to second order."""

import math
import subprocess
import sys

import pytest
import torch
from functions.attention.oracle import ROUTES, assert_close, by_primitives, derivatives, normal
from hypothesis import given, settings
from hypothesis import strategies as st

from hodiff.functions import attention
from hodiff.kernels import fused
from hodiff.kernels.attention import cpu

built = pytest.mark.skipif(not fused.available(), reason="the kernels were not built")
SHAPES = ((2, 3, 37, 5), (1, 3, 45, 5), (2, 3, 45, 4))
# The sizes exceed a panel of rows. The masks lack some dimensions or have more dimensions than the tensors.
MASKS = [(2, 3, 37, 45), (1, 3, 37, 45), (37, 45), (2, 1, 1, 45), (1, 45), (3, 37, 1), (2, 1, 1, 1), (2, 1, 1, 37, 45)]
OPTIONS = {
    "plain": {},
    "all at once": {"is_causal": True, "softcap": 1.5, "window": (20, None)},
    "from the end": {"window": (10, 4), "corner": "lower-right"},
}


def with_hidden(mask):
    """Hide some keys from some queries, and all keys from one query."""
    mask = mask.clone()
    mask[..., ::5, ::3] = -math.inf
    if mask.shape[-2] > 1:
        mask[..., 1, :] = -math.inf
    return mask


def drawn(shapes, seed=0):
    return tuple(normal(*shape, seed=seed + i) for i, shape in enumerate(shapes))


def assert_derivatives_match(inputs, options, tolerance=1e-12, dtype=torch.float64, reference=None, **ours):
    """Compare derivatives with respect to all inputs, including the mask."""
    directions = drawn([x.shape for x in inputs], seed=10)
    given = {name: each for name, each in options.items() if name != "corner"}
    given |= {"causal_corner": options.get("corner", "upper-left"), **ours}
    expected_of = reference or (lambda *x: by_primitives(*x, **options))
    cotangent = normal(*expected_of(*inputs).shape, seed=20)
    expected = derivatives(expected_of, inputs, directions, cotangent)
    ours = [tuple(x.to(dtype) for x in each) for each in (inputs, directions)]
    assert_close(derivatives(lambda *x: attention(*x, **given), *ours, cotangent.to(dtype)), expected, tolerance)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("shape", MASKS, ids=str)
@pytest.mark.parametrize("by", ["kernels", "operators"])
def test_derivatives_by_broadcast_masks_match_primitives(shape, options, by, calls, monkeypatch):
    if by == "operators":
        monkeypatch.setattr(cpu, "takes", lambda inputs: False)
    assert_derivatives_match((*drawn(SHAPES), with_hidden(normal(*shape))), options)
    assert any("mask" in each for each in calls) == (by == "kernels" and fused.available())


@pytest.mark.parametrize("shape", [(37, 45), (2, 1, 1, 45)], ids=str)
def test_float32_matches_primitives(shape):
    inputs = tuple(x.float().double() for x in (*drawn(SHAPES), with_hidden(normal(*shape))))
    assert_derivatives_match(inputs, OPTIONS["all at once"], tolerance=2e-5, dtype=torch.float32)


@st.composite
def masks(draw, batch, heads, rows, keys):
    """Draw a mask of broadcastable shape and arbitrary strides, with hidden keys."""
    shape = [size if draw(st.booleans()) else 1 for size in (batch, heads, rows, keys)]
    mask = with_hidden(normal(*shape))
    if draw(st.booleans()):
        mask = mask.mT.contiguous().mT
    if draw(st.booleans()):
        mask = torch.stack((mask, normal(*shape)), -1).flatten(-2)[..., ::2]
    return mask


@pytest.mark.slow
@built
@settings(max_examples=12)
@given(st.data())
def test_combined_options_match_primitives(data):
    """Derivatives match with shared heads, dropout, a band, a soft-cap, and any split over threads."""
    number = st.integers
    batch, shared, rows, keys = (data.draw(number(1, high)) for high in (2, 2, 70, 70))
    groups = data.draw(number(1, 2))
    options = {
        "is_causal": data.draw(st.booleans()),
        "softcap": data.draw(st.sampled_from([None, 1.5])),
        "window": data.draw(st.sampled_from([(None, None), (9, None), (20, 3)])),
        "corner": data.draw(st.sampled_from(["upper-left", "lower-right"])),
    }
    mask = data.draw(masks(batch, shared * groups, rows, keys))
    expanded = data.draw(st.booleans())  # overlapping heads with separate gradients
    q, k, v = drawn([(batch, shared * groups, rows, 3), (batch, shared, keys, 3), (1, shared, keys, 2)])
    given = {name: each for name, each in options.items() if name != "corner"}
    given |= {"causal_corner": options["corner"], "dropout_p": 0.3, "enable_gqa": True}
    chunks, slices = data.draw(number(1, 4)), data.draw(number(1, 4))

    def ours(q, k, v, mask):
        mask = mask.expand(-1, shared * groups, -1, -1) if expanded else mask
        return attention(q, k, v, mask, generator=torch.Generator().manual_seed(3), **given)

    # With the unit matrix as values, the output shows which weights are kept.
    keep = (ours(q, k, torch.eye(keys, dtype=q.dtype).expand(1, shared, -1, -1), mask) != 0).double() / 0.7

    def reference(q, k, v, mask):
        k, v = (each.repeat_interleave(groups, -3) for each in (k, v))
        return by_primitives(q, k, v, mask, **options, keep=keep)

    inputs = (q, k, v, mask)
    directions = drawn([x.shape for x in inputs], seed=10)
    cotangent = normal(*reference(*inputs).shape, seed=20)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "_chunks", lambda groups, panels, threads: min(chunks, panels))
        patch.setattr(cpu, "_slices", lambda pieces, shared, threads: min(slices, shared))
        found = derivatives(ours, inputs, directions, cotangent)
    assert_close(found, derivatives(reference, inputs, directions, cotangent), 1e-12)


@built
def test_only_the_mask_gradient_is_computed(calls):
    q, k, v = drawn(SHAPES)
    mask = normal(37, 45).requires_grad_()
    (found,) = torch.autograd.grad(attention(q, k, v, mask).sum(), mask)
    assert calls == [("out",), ("mask",)]
    torch.testing.assert_close(found, torch.autograd.grad(by_primitives(q, k, v, mask).sum(), mask)[0])


@built
@pytest.mark.parametrize("shape", MASKS[:5], ids=str)
def test_repeated_runs_are_bitwise_equal_with_uninitialized_memory(shape, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    inputs, directions = ((*drawn(SHAPES, seed), normal(*shape, seed=seed)) for seed in (0, 10))
    cotangent = normal(*attention(*inputs).shape)
    clean = derivatives(attention, inputs, directions, cotangent)
    empty = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda self, *size, **kw: empty(self, *size, **kw).fill_(math.nan))
    poisoned = derivatives(attention, inputs, directions, cotangent)
    for name in ROUTES:
        for a, b in zip(clean[name], poisoned[name], strict=True):
            assert torch.equal(a, b), name


@built
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_non_finite_mask_element_affects_its_row_only(poison):
    """A non-finite mask element affects only the output row and the gradient row that contain it."""
    q, k, v = drawn(SHAPES)
    mask = normal(37, 45)
    mask[11, 40] = poison
    y, pull = torch.func.vjp(lambda m: attention(q, k, v, m), mask)
    (by_mask,) = pull(torch.ones_like(y))
    rows = torch.arange(37) != 11
    assert torch.equal(y.isfinite().all(-1), rows.expand(2, 3, 37))
    assert torch.equal(by_mask.isfinite().all(-1), rows)


# Like relative positions: one slope for each head and distance. The heads share the mask.
MEMORY = """
import resource, sys, torch
from hodiff.functions import attention
torch.set_num_threads(1)
def product(length):
    inputs = [torch.randn(16, length, 16).requires_grad_() for _ in range(3)]
    mask = torch.randn(length, length).requires_grad_()
    first = torch.autograd.grad(attention(*inputs, mask).square().sum(), mask, create_graph=True)
    torch.autograd.grad(first, mask, mask.detach())
product(64)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
product(int(sys.argv[1]))
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


@built
@pytest.mark.slow
def test_process_memory_is_a_few_times_the_mask():
    """A product with a mask that 16 heads share takes a few matrices of mask size, not one per head."""
    done = subprocess.run([sys.executable, "-c", MEMORY, "1024"], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 8 * 4 * 1024**2 + 2**24


@pytest.mark.parametrize("kind", ["gradient", "gradient_tangent"])
def test_operator_with_mask_gradients_passes_opcheck(kind):
    q, k, v, t = (normal(2, 3, 6, 4, dtype=torch.float32, seed=i) for i in range(4))
    mask = normal(1, 3, 1, 6, dtype=torch.float32)
    given = {"gradient": [t], "gradient_tangent": [t, None, t, t, mask, t]}
    found = torch.library.opcheck(
        torch.ops.hodiff.attention,
        (kind, [q, k, v, mask, None, *given[kind]], [True, False, True, True], False, 0.3, -2, 3, 2.0, 0.0, [2, 3]),
    )
    assert set(found.values()) == {"SUCCESS"}
