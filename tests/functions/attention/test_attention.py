"""Tests of attention: masks, memory, dropout, shared heads, and refused arguments."""

import re

import pytest
import torch
import torch.nn.functional as F
from drawing import draw_each, seeded
from functions.cases.attention import by_primitives
from memory_use import LiveMemory
from torch.nn.attention import SDPBackend, sdpa_kernel

import hodiff
from hodiff.checks import derivative, route_names
from hodiff.errors import InputError
from hodiff.functions.attention.attention import attention
from hodiff.rules import blockwise


@pytest.fixture
def small_blocks(monkeypatch):
    """Use blocks of two rows, so that small inputs have several blocks."""
    monkeypatch.setattr(blockwise, "BLOCK", 1)
    monkeypatch.setattr(blockwise, "FEWEST_ROWS", 2)


def all_derivatives(f, inputs):
    """Compute the value, the gradient, and one Hessian-vector product by each route."""

    def phi(flat):
        parts = [part.reshape(x.shape) for part, x in zip(flat.split([x.numel() for x in inputs]), inputs, strict=True)]
        y = f(*parts)
        return (y * torch.linspace(0.5, 1.5, y.numel(), dtype=y.dtype).reshape(y.shape)).sum() + y.square().sum()

    point = torch.cat([x.reshape(-1) for x in inputs])
    v = torch.linspace(-1, 1, point.numel(), dtype=point.dtype)
    reverse = torch.func.grad(phi)(point)
    routes = [name for name in route_names(2) if name != "forward-over-forward"]
    return [f(*inputs), reverse, *(derivative(phi, name)(point, v) for name in routes)]


def assert_same(a, b, tolerance=1e-11):
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=tolerance * max(1.0, float(y.detach().abs().max())))


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3}], ids=str)
def test_values_match_torch(options, small_blocks):
    q, k, v = draw_each((2, 3, 7, 4), (2, 3, 7, 4), (2, 3, 7, 5))
    with sdpa_kernel(SDPBackend.MATH):
        expected = F.scaled_dot_product_attention(q, k, v, **options)
    assert_same([attention(q, k, v, **options)], [expected])


def test_block_size_does_not_change_derivatives(small_blocks):
    inputs = draw_each((5, 2), (4, 2), (4, 3), (5, 4))
    assert_same(all_derivatives(attention, inputs), all_derivatives(by_primitives, inputs))


def test_causal_mask_with_additive_mask_matches_primitives(small_blocks):
    inputs = draw_each((5, 2), (5, 2), (5, 3), (5, 5))
    visible = torch.ones(5, 5).tril().bool()
    ours = all_derivatives(lambda q, k, v, m: attention(q, k, v, m, is_causal=True), inputs)
    assert_same(ours, all_derivatives(lambda q, k, v, m: by_primitives(q, k, v, m, visible), inputs))


@pytest.mark.slow
def test_third_derivatives_match_differences(small_blocks):
    inputs = draw_each((3, 1), (3, 1), (3, 1))
    hodiff.assert_differentiable(lambda *x: attention(*x, is_causal=True), inputs, order=3, scipy=False)


@pytest.mark.parametrize("shape", [(), (4,), (1, 4), (5, 1), (3, 1, 4), (2, 1, 5, 4)], ids=str)
def test_broadcast_masks_match_primitives(shape, small_blocks):
    mask = draw_each(shape)[0]
    inputs = (*draw_each((3, 5, 2), (4, 2), (3, 4, 1)), mask)
    assert_same(all_derivatives(attention, inputs), all_derivatives(by_primitives, inputs))


@pytest.mark.parametrize("kind", ["boolean", "additive"])
def test_fully_masked_rows_are_zero_with_zero_derivatives(kind, small_blocks):
    q, k, v = draw_each((4, 2), (3, 2), (3, 2))
    visible = torch.tensor([[True, False, True], [False, False, False], [True, True, True], [False, False, False]])
    mask = visible if kind == "boolean" else torch.zeros(4, 3, dtype=torch.float64).masked_fill(~visible, -torch.inf)
    seen = [0, 2]
    ours = all_derivatives(lambda q, k, v: attention(q, k, v, mask), (q, k, v))
    assert not ours[0][[1, 3]].any()
    zeros = torch.zeros(1, 2, dtype=torch.float64)

    def reference(q, k, v):
        y = by_primitives(q[seen], k, v, visible=visible[seen])
        return torch.cat([y[:1], zeros, y[1:], zeros])

    assert_same(ours, all_derivatives(reference, (q, k, v)))
    if kind == "additive":
        by_mask = torch.func.grad(lambda m: attention(q, k, v, m).square().sum())(mask)
        assert not by_mask[~visible].any()
        assert bool(by_mask.isfinite().all())


def test_shared_heads_match_repeated_heads(small_blocks):
    inputs = draw_each((2, 4, 3, 2), (2, 2, 3, 2), (2, 2, 3, 2), (4, 3, 3))

    def reference(q, k, v, mask):
        return by_primitives(q, k.repeat_interleave(2, -3), v.repeat_interleave(2, -3), mask)

    ours = all_derivatives(lambda *x: attention(*x, enable_gqa=True), inputs)
    assert_same(ours, all_derivatives(reference, inputs))
    q, k, v, _ = inputs
    expected = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    assert_same([attention(q, k, v, enable_gqa=True)], [expected])


def dropout_factors(q, k, seed, p=0.5):
    """Return the dropout factors, by applying attention to unit vectors."""
    eye = torch.eye(k.shape[-2], dtype=q.dtype)
    weights = attention(q, k, eye)
    return attention(q, k, eye, dropout_p=p, generator=seeded(seed)) / weights


def test_dropout_uses_one_mask_in_every_derivative(small_blocks):
    q, k, v = draw_each((5, 2), (4, 2), (4, 3))
    factors = dropout_factors(q, k, 3)
    ours = all_derivatives(lambda q, k, v: attention(q, k, v, dropout_p=0.5, generator=seeded(3)), (q, k, v))
    reference = all_derivatives(lambda q, k, v: (torch.softmax(q @ k.mT / 2**0.5, -1) * factors) @ v, (q, k, v))
    assert_same(ours, reference)


def test_dropout_mask_does_not_depend_on_block_size(monkeypatch):
    q, k = draw_each((2, 9, 2), (2, 8, 2))
    whole = dropout_factors(q, k, 1)
    monkeypatch.setattr(blockwise, "BLOCK", 1)
    monkeypatch.setattr(blockwise, "FEWEST_ROWS", 2)
    assert_same([dropout_factors(q, k, 1)], [whole])


def test_dropout_rate_and_scale_are_right():
    q, k = torch.zeros(4, 100, 1), torch.zeros(4, 80, 1)
    factors = dropout_factors(q, k, 2, p=0.3)
    kept = factors > 0.5
    torch.testing.assert_close(factors[kept], torch.full_like(factors[kept], 1 / 0.7))
    # The tolerance is five standard errors of 32,000 draws. Rows, columns and batches must be uncorrelated.
    assert abs(float(kept.float().mean()) - 0.7) < 5 * (0.21 / kept.numel()) ** 0.5
    centered = kept.float() - kept.float().mean()
    for dim in range(3):
        correlation = (centered * centered.roll(1, dim)).mean() / 0.21
        assert abs(float(correlation)) < 5 / kept.numel() ** 0.5
    assert not torch.equal(kept, dropout_factors(q, k, 5, p=0.3) > 0.5)


def test_dropout_draws_once_per_call_from_its_generator():
    q, k, v = draw_each((3, 2), (3, 2), (3, 2))
    generator, state = seeded(), torch.get_rng_state()
    first = attention(q, k, v, dropout_p=0.5, generator=generator)
    second = attention(q, k, v, dropout_p=0.5, generator=generator)
    assert not torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), state)


def test_dropout_of_everything_gives_zeros():
    q, k, v = draw_each((3, 2), (3, 2), (3, 2))
    assert not attention(q, k, v, dropout_p=1.0, generator=seeded()).any()


def gradient_step(f, q, k, v):
    torch.autograd.grad(f(q, k, v).square().sum(), (q, k, v))


def product_step(f, q, k, v):
    torch.func.jvp(lambda q: torch.func.grad(lambda q: f(q, k, v).square().sum())(q), (q.detach(),), (q.detach(),))


def reverse_product_step(f, q, k, v):
    g = torch.autograd.grad(f(q, k, v).square().sum(), (q, k, v), create_graph=True)
    torch.autograd.grad(sum(each.square().sum() for each in g), (q, k, v))


def peak_bytes(step, f, length):
    q, k, v = (x.requires_grad_() for x in draw_each(*[(length, 8)] * 3, dtype=torch.float32))
    with LiveMemory() as counted:
        step(f, q, k, v)
    return counted.peak


@pytest.mark.one_in(4)
@pytest.mark.parametrize("step", [gradient_step, product_step, reverse_product_step])
def test_memory_is_linear_in_the_length(step, monkeypatch):
    monkeypatch.setattr(blockwise, "BLOCK", 2**15)
    ours = {length: peak_bytes(step, attention, length) for length in (1024, 2048)}
    quadratic = peak_bytes(step, by_primitives, 2048)
    assert quadratic > 3 * 4 * 2048**2
    assert ours[2048] < quadratic / 8
    assert ours[2048] < 2.2 * ours[1024]


def test_memory_counter_detects_quadratic_growth():
    assert peak_bytes(gradient_step, by_primitives, 512) > 3.5 * peak_bytes(gradient_step, by_primitives, 256)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_is_computed_in_float32(dtype):
    q, k, v = (x.to(dtype) for x in draw_each((33, 8), (65, 8), (65, 8)))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    y = attention(*leaves)
    gradients = torch.autograd.grad(y.float().square().sum(), leaves)
    doubles = [x.double().requires_grad_() for x in (q, k, v)]
    expected = by_primitives(*doubles)
    # The cotangent is the rounded 2 y.
    truth = torch.autograd.grad(expected, doubles, 2 * y.detach().double())
    for got, exact in zip((y, *gradients), (expected, *truth), strict=True):
        assert got.dtype == dtype
        error = (got.detach().double() - exact.detach()).abs().max() / exact.detach().abs().max()
        assert float(error) < torch.finfo(dtype).eps


@pytest.mark.parametrize("sizes", [(0, 3), (3, 0)], ids=str)
def test_no_queries_or_keys_give_zeros(sizes):
    rows, keys = sizes
    q, k, v = (x.requires_grad_() for x in draw_each((rows, 2), (keys, 2), (keys, 4)))
    y = attention(q, k, v, torch.ones(rows, keys, dtype=torch.bool))
    assert y.shape == (rows, 4)
    assert not y.any()
    for gradient in torch.autograd.grad(y.sum(), (q, k, v), create_graph=True):
        assert not gradient.any()


@pytest.mark.parametrize(
    "mask",
    [None, torch.zeros(2, 0, 5, 7), torch.zeros(1, 5, 7, dtype=torch.bool)],
    ids=["no mask", "additive", "boolean"],
)
def test_no_heads_give_an_empty_output(mask):
    q, k, v = (torch.zeros(2, 0, *sizes, requires_grad=True) for sizes in ((5, 4), (7, 4), (7, 3)))
    y = attention(q, k, v, mask, enable_gqa=True)
    assert y.shape == (2, 0, 5, 3)
    for x, gradient in zip((q, k, v), torch.autograd.grad(y.sum(), (q, k, v), create_graph=True), strict=True):
        assert gradient.shape == x.shape


Q = torch.zeros(2, 3, 4)
META = Q.to("meta")
EIGHT = Q.to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((Q.int(), Q, Q), {}, "attention: q: expected a floating-point tensor, got int32"),
        ((Q, Q[..., :2], Q), {}, "expected q (..., L, E), k (..., S, E) and v (..., S, F)"),
        ((Q, Q, Q[:, :2]), {}, "v (2, 2, 4)"),
        ((Q, Q, Q.double()), {}, "of one dtype, got torch.float32, torch.float32 and torch.float64"),
        (
            (Q, Q.expand(2, 3, 4)[:1].expand(3, 3, 4), Q),
            {},
            "batch dimensions that broadcast, got q (2,), k (3,), v (2,)",
        ),
        ((Q, Q, Q, torch.zeros(3, 3, dtype=torch.int64)), {}, "tensor, got torch.int64; mask.bool() converts."),
        ((Q, Q, Q, torch.zeros(3, 2)), {}, "S 3 or 1, got (3, 2)"),
        ((Q, META, Q), {}, "attention: expected tensors of one device, got q on cpu, k on meta, v on cpu; Tensor.to"),
        ((META, META, META, torch.zeros(3, 3)), {}, "v on meta, mask on cpu; Tensor.to moves them."),
        ((EIGHT, EIGHT, EIGHT), {}, "attention: q: expected a floating-point tensor of 16 bits or more, got float8"),
        ((Q, Q.to_sparse(), Q), {}, "attention: k: expected a dense tensor, got (2, 3, 4) float32 sparse_coo"),
        ((Q, Q, Q, torch.ones(3, 3).bool().to_sparse()), {}, "attention: mask: expected a dense tensor, got (3, 3)"),
        ((Q, Q, Q, torch.ones(3, 3).to(EIGHT.dtype)), {}, "attention: mask: expected a floating-point tensor of 16"),
        ((Q, Q, Q, torch.zeros(2)), {}, "S 3 or 1, got (1, 2)"),
        ((Q, Q, Q), {"is_causal": "no"}, "attention: is_causal: expected True or False, got 'no'"),
        ((Q, Q, Q), {"enable_gqa": 1}, "attention: enable_gqa: expected True or False, got 1"),
        ((Q, Q, Q), {"dropout_p": 0.1}, "generator: expected a torch.Generator"),
        ((Q, Q, Q), {"dropout_p": 0.1, "generator": 3}, "generator: expected a torch.Generator or None, got 3"),
        ((Q, Q, Q), {"dropout_p": 1.5}, "dropout_p: expected a number from 0 to 1, got 1.5"),
        ((Q, Q, Q), {"softcap": float("inf")}, "softcap: expected a positive finite number or None, got inf"),
        ((Q, Q, Q), {"window": (1, -1)}, "window: expected None or two numbers of keys"),
        (
            (Q, Q, Q),
            {"causal_corner": "left"},
            "causal_corner: expected one of 'upper-left', 'lower-right', got 'left'",
        ),
        ((Q, Q, Q), {"scale": "x"}, "scale: expected a number or None, got 'x'"),
        (
            (Q, Q[:1].expand(3, 3, 4), Q[:1].expand(3, 3, 4)),
            {"enable_gqa": True},
            "heads of k and v that divide those of q",
        ),
        ((Q, Q[:0], Q[:0]), {"enable_gqa": True}, "heads of k and v that divide those of q"),
    ],
)
def test_rejects_bad_arguments(arguments, options, message):
    with pytest.raises(InputError, match=re.escape(message)):
        attention(*arguments, **options)


def test_meta_tensors_are_accepted():
    q = torch.empty(2, 3, 4, device="meta")
    assert attention(q, q, q, is_causal=True).shape == (2, 3, 4)
