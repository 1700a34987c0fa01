"""Tests of `flex_attention`: derivatives against primitives, memory, and refused arguments."""

import math
import re
from functools import cache

import pytest
import torch
from drawing import draw
from functions.attention.flex_problems import (
    PROBLEMS,
    alibi,
    blind,
    capped,
    causal,
    mask_of,
    relative,
)
from functions.attention.test_attention import gradient_step, peak_bytes, product_step, reverse_product_step
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.utils import _pytree as pytree

import hodiff
from hodiff.checks import derivative, route_names
from hodiff.errors import InputError
from hodiff.functions import attention, flex_attention
from hodiff.functions.attention.flex import flex_attention as room
from hodiff.functions.attention.flex import flex_rows as rows
from hodiff.rules import blockwise


@pytest.fixture
def small_blocks(monkeypatch):
    """Use blocks of two rows, so that small inputs have several blocks."""
    monkeypatch.setattr(blockwise, "BLOCK", 1)
    monkeypatch.setattr(blockwise, "FEWEST_ROWS", 2)
    monkeypatch.setattr(room, "_ROWS_TO_SKIP", 2)


def weighted(f, inputs):
    """Return a scalar function of a flat vector, the point, and a direction."""
    sizes = [x.numel() for x in inputs]

    def phi(flat):
        parts = (part.reshape(x.shape) for part, x in zip(flat.split(sizes), inputs, strict=True))
        total = 0.0
        for y in pytree.tree_leaves(f(*parts)):
            w = torch.linspace(0.5, 1.5, y.numel(), dtype=y.dtype).reshape(y.shape)
            total = total + (y * w).sum() + y.square().sum()
        return total

    point = torch.cat([x.reshape(-1) for x in inputs])
    return phi, point, torch.linspace(-1, 1, point.numel(), dtype=point.dtype)


def to_second_order(f, inputs):
    """Return the value, gradient and tangent, and one Hessian-vector product by each route."""
    phi, point, v = weighted(f, inputs)
    slope = torch.func.jvp(phi, (point,), (v,))[1]
    return [*pytree.tree_leaves(f(*inputs)), torch.func.grad(phi)(point), slope, *products(phi, point, v, 2)]


def products(phi, point, v, order):
    return [derivative(phi, name)(point, *[v] * (order - 1)) for name in route_names(order) if "reverse" in name]


def assert_same(ours, expected, tolerance=1e-11):
    for x, y in zip(ours, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=tolerance * max(1.0, float(y.detach().abs().max())))


@pytest.mark.one_in(12)
@pytest.mark.parametrize("name", PROBLEMS)
def test_second_derivatives_match_primitives(name, small_blocks):
    problem = PROBLEMS[name]
    inputs = problem.inputs()
    assert_same(to_second_order(problem.ours, inputs), to_second_order(problem.by_primitives, inputs))


@pytest.mark.parametrize("name", list(PROBLEMS)[1::5])
def test_second_derivatives_in_one_block_match_primitives(name):
    problem = PROBLEMS[name]
    inputs = problem.inputs()
    assert_same(to_second_order(problem.ours, inputs), to_second_order(problem.by_primitives, inputs))


def third_derivatives(f, inputs):
    """Compute the third derivative along one direction by three compositions of transforms."""
    phi, point, v = weighted(f, inputs)

    def product(x):
        return torch.func.jvp(torch.func.grad(phi), (x,), (v,))[1]

    def by_reverse(x):
        return torch.func.grad(lambda y: (torch.func.grad(phi)(y) * v).sum())(x)

    forward = [torch.func.jvp(each, (point,), (v,))[1] for each in (product, by_reverse)]
    return [*forward, torch.func.grad(lambda x: (product(x) * v).sum())(point)]


@pytest.mark.slow
@pytest.mark.parametrize("name", PROBLEMS)
def test_third_derivatives_match_primitives(name, small_blocks):
    problem = PROBLEMS[name]
    inputs = problem.inputs()
    assert_same(third_derivatives(problem.ours, inputs), third_derivatives(problem.by_primitives, inputs), 1e-10)


def test_third_derivatives_by_bias_and_soft_cap_match_primitives():
    for name in ("relative bias, shared heads", "soft-cap"):
        problem = PROBLEMS[name]
        phi, point, v = weighted(problem.ours, problem.inputs())
        expected, *_ = weighted(problem.by_primitives, problem.inputs())
        third = [torch.func.jvp(torch.func.grad(each), (point,), (v,))[1] for each in (phi, expected)]
        assert_same(third[:1], third[1:])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["relative bias, shared heads", "blind rows, soft-cap"])
def test_third_derivatives_match_differences(name, small_blocks):
    problem = PROBLEMS[name]
    q, k, v, *others = problem.inputs()
    hodiff.assert_differentiable(problem.ours, (q[:1], k[:1], v[:1], *others), order=3, scipy=False)


@pytest.mark.slow
def test_derivatives_by_a_learned_table_match_scipy():
    problem = PROBLEMS["relative bias, causal blocks"]
    q, k, v, table = problem.inputs()
    middle = table.shape[1] // 2

    def f(t):
        row = torch.cat([table[0, : middle - 1], t, table[0, middle + 2 :]])
        return problem.ours(q, k, v, row[None].expand(2, -1)).square().sum()

    x = table[0, middle - 1 : middle + 2].clone()
    estimate = hodiff.checks.scipy_hessian(f, x)
    assert (estimate.matrix != 0).all()
    torch.testing.assert_close(hodiff.hessian(f)(x), estimate.matrix, rtol=1e-6, atol=1e-6)


def of_one_head(score_mod=None, *closed_over, block_mask=None):
    """Return attention of one head as a function of two-dimensional tensors."""

    def f(*x):
        function = None if score_mod is None else score_mod(*closed_over)
        mask = None if block_mask is None else block_mask(x[0].shape[0])
        return flex_attention(*(each[None, None] for each in x), function, block_mask=mask)[0, 0]

    return f


@cache
def causal_blocks(length):
    """Cache the mask before memory is counted: torch builds it from the whole matrix."""
    return create_block_mask(causal, None, None, length, length, device="cpu")


LEARNED = draw(1, 4096, seed=5, dtype=torch.float32).requires_grad_()
LONG = {
    "alibi": of_one_head(alibi, torch.zeros(1)),
    "learned bias": of_one_head(lambda table: lambda score, b, h, i, j: score + table[h, i - j + 2048], LEARNED),
    "soft-cap": of_one_head(capped, torch.ones(1)),
    "causal": of_one_head(block_mask=causal_blocks),
}
STEPS = [gradient_step, product_step, reverse_product_step]


@pytest.mark.slow
@pytest.mark.parametrize("name", LONG)
@pytest.mark.parametrize("step", STEPS)
def test_memory_is_linear_in_the_length(name, step, monkeypatch):
    assert_linear(LONG[name], step, monkeypatch, 1024)


@pytest.mark.slow
def test_memory_of_a_product_is_linear_in_the_length(monkeypatch):
    assert_linear(LONG["learned bias"], product_step, monkeypatch, 512)


def assert_linear(f, step, monkeypatch, length):
    monkeypatch.setattr(blockwise, "BLOCK", 64 * length)
    for each in (length, 2 * length):
        causal_blocks(each)
    short, long = (peak_bytes(step, f, each) for each in (length, 2 * length))
    assert long < 2.2 * short
    assert long < 3 * 4 * (2 * length) ** 2 / 2  # half the size of three weight matrices


def kernels_run(monkeypatch, f):
    """Return the number of calls of `attention`, which runs the kernels."""
    found = []
    monkeypatch.setattr(
        rows,
        "attention",
        lambda *x, **options: found.append(x) or attention(*x, **options),
    )
    f()
    return len(found)


def test_additive_score_functions_use_the_kernels(monkeypatch):
    q, k, v, table = PROBLEMS["relative bias"].inputs()
    assert kernels_run(monkeypatch, lambda: flex_attention(q, k, v, relative(table), causal)) == 1
    assert kernels_run(monkeypatch, lambda: flex_attention(q, k, v, capped(table[:, 0]))) == 0


def test_keys_hidden_from_a_block_are_skipped(monkeypatch, small_blocks):
    q, k, v = PROBLEMS["causal blocks"].inputs()
    sizes = []
    monkeypatch.setattr(
        rows,
        "attention",
        lambda q, k, *x, **options: sizes.append(k.shape[-2]) or attention(q, k, *x, **options),
    )
    flex_attention(q, k, v, block_mask=mask_of(causal))
    assert sizes == [2, 4, 6]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["relative bias, shared heads", "blind rows, soft-cap"])
def test_vmap_of_gradients_matches_a_loop(name, small_blocks):
    problem = PROBLEMS[name]
    inputs = problem.inputs()
    batched = [torch.stack([x, 0.5 * x, -x]) for x in inputs]
    one = torch.func.grad(lambda *x: problem.ours(*x).square().sum(), argnums=tuple(range(4)))
    for at in range(4):
        dims = tuple(0 if i == at else None for i in range(4))
        arguments = [batched[i] if i == at else x for i, x in enumerate(inputs)]
        found = torch.func.vmap(one, in_dims=dims)(*arguments)
        rows = [one(*(x[n] if i == at else x for i, x in enumerate(arguments))) for n in range(3)]
        assert_same(found, [torch.stack(each) for each in zip(*rows, strict=True)])


def test_hessian_by_the_soft_cap_matches_primitives():
    problem = PROBLEMS["soft-cap"]
    q, k, v, caps = problem.inputs()
    ours, expected = (
        torch.func.hessian(lambda c, f=f: f(q, k, v, c).square().sum())(caps)
        for f in (problem.ours, problem.by_primitives)
    )
    assert_same([ours, hodiff.hessian(lambda c: problem.ours(q, k, v, c).square().sum())(caps)], [expected] * 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["relative bias, shared heads", "blind rows, soft-cap"])
def test_low_precision_is_computed_in_float32(name, dtype, small_blocks):
    problem = PROBLEMS[name]
    *inputs, closed_over = problem.inputs()
    narrow = [x.to(dtype) for x in inputs]
    exact = [x.double() for x in narrow]
    for f, g in (
        (lambda *x: x[0], lambda *x: x[0]),
        (lambda y, q: torch.autograd.grad(y.double().sum(), q)[0],) * 2,
    ):
        q, r = narrow[0].clone().requires_grad_(), exact[0].clone().requires_grad_()
        found = f(problem.ours(q, *narrow[1:], closed_over.float()), q)
        expected = g(problem.by_primitives(r, *exact[1:], closed_over.float().double()), r)
        assert found.dtype == dtype
        scale = float(expected.detach().abs().max())
        assert float((found.detach().double() - expected.detach()).abs().max()) < 4 * torch.finfo(dtype).eps * scale


def test_autocast_lowers_query_key_and_value_only():
    problem = PROBLEMS["relative bias"]
    q, k, v, table = (x.float() for x in problem.inputs())
    with torch.autocast("cpu", torch.bfloat16):
        found = problem.ours(q, k, v, 300 * table)
    assert found.dtype == torch.bfloat16
    lowered = (x.bfloat16() for x in (q, k, v))
    torch.testing.assert_close(found, problem.ours(*lowered, 300 * table), rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["relative bias, causal blocks", "soft-cap", "listed blocks", "exponents"])
def test_compiles_to_one_graph(name):
    problem = PROBLEMS[name]
    inputs = problem.inputs()
    ours = torch.compile(problem.ours, fullgraph=True, backend="aot_eager")
    leaves = [x.clone().requires_grad_() for x in inputs]
    first = [
        torch.autograd.grad(sum(y.sin().sum() for y in pytree.tree_leaves(f(*leaves))), leaves)
        for f in (ours, problem.by_primitives)
    ]
    assert_same(*first)
    phi, point, v = weighted(problem.ours, inputs)
    product = torch.compile(
        lambda x: torch.func.jvp(torch.func.grad(phi), (x,), (v,))[1], fullgraph=True, backend="aot_eager"
    )
    expected, *_ = weighted(problem.by_primitives, inputs)
    assert_same([product(point)], [torch.func.jvp(torch.func.grad(expected), (point,), (v,))[1]])


@pytest.mark.parametrize("sizes", [(0, 3), (3, 0)], ids=str)
@pytest.mark.parametrize("score_mod", [None, capped(torch.ones(2))])
def test_no_queries_or_keys_give_zeros(sizes, score_mod):
    rows, keys = sizes
    q, k, v = (draw(1, 2, n, 4).requires_grad_() for n in (rows, keys, keys))
    y, exponents = flex_attention(q, k, v, score_mod, causal, return_lse=True)
    assert y.shape == (1, 2, rows, 4)
    assert not y.any()
    assert exponents.shape == (1, 2, rows)
    for gradient in torch.autograd.grad(y.sum(), (q, k, v), create_graph=True):
        assert not gradient.any()


def test_fully_masked_rows_are_zero_with_logsumexp_of_minus_infinity(small_blocks):
    q, k, v = PROBLEMS["documents"].inputs()
    y, exponents = flex_attention(q, k, v, mask_mod=blind, return_lse=True)
    hidden = torch.tensor([[False, True, False, True, False], [True, False, True, False, True]])
    assert torch.equal((y == 0).all(-1), hidden.expand(2, -1, -1))
    assert torch.equal(exponents == -math.inf, hidden.expand(2, -1, -1))


def test_result_may_be_changed_in_place():
    q = draw(1, 2, 5, 2).requires_grad_()
    score_mod = capped(torch.ones(2))
    for results in ((flex_attention(q, q, q, score_mod),), flex_attention(q, q, q, score_mod, return_lse=True)):
        expected = torch.autograd.grad(sum(3 * y.sum() for y in results), q, retain_graph=True)[0]
        for y in results:
            y.mul_(3)
        torch.testing.assert_close(torch.autograd.grad(sum(y.sum() for y in results), q)[0], expected)


def test_works_in_inference_mode():
    problem = PROBLEMS["soft-cap"]
    inputs = problem.inputs()
    phi, point, v = weighted(problem.ours, inputs)
    expected, *_ = weighted(problem.by_primitives, inputs)
    with torch.inference_mode():
        found = torch.func.grad(phi)(point), hodiff.hvp(phi, point, v)
    assert_same(found, (torch.func.grad(expected)(point), torch.func.jvp(torch.func.grad(expected), (point,), (v,))[1]))


@pytest.mark.slow
def test_hvp_of_a_dynamically_compiled_function_matches():
    problem = PROBLEMS["soft-cap"]
    phi, point, v = weighted(problem.ours, problem.inputs())
    expected, *_ = weighted(problem.by_primitives, problem.inputs())
    found = hodiff.hvp(torch.compile(phi, dynamic=True, backend="eager"), point, v)
    assert_same([found], [torch.func.jvp(torch.func.grad(expected), (point,), (v,))[1]])


Q = torch.zeros(1, 2, 5, 2)
MASK = mask_of(causal)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((Q[0], Q[0], Q[0]), {}, "expected q (B, H, L, E), k (B, H, S, E) and v (B, H, S, F), got q (2, 5, 2)"),
        ((Q.int(), Q, Q), {}, "q: expected a floating-point tensor"),
        ((Q, Q.double(), Q), {}, "of one dtype, got torch.float32, torch.float64 and torch.float32"),
        ((Q, Q.to("meta"), Q), {}, "flex_attention: expected tensors of one device, got q on cpu, k on meta, v on cpu"),
        ((Q, Q, Q.to_sparse()), {}, "flex_attention: v: expected a dense tensor"),
        ((Q, Q[:, :0], Q[:, :0]), {"enable_gqa": True}, "with enable_gqa=True a number that divides it"),
        ((Q, Q[:, :1], Q[:, :1]), {}, "with enable_gqa=True a number that divides it"),
        ((Q.expand(3, 2, 5, 2), Q.expand(2, 2, 5, 2), Q.expand(2, 2, 5, 2)), {}, "expected batches that broadcast"),
        ((Q, Q, Q, 3), {}, "score_mod: expected a callable"),
        (
            (Q, Q, Q, lambda x, b, h, i, j: 1.0),
            {},
            "score_mod: expected a function that returns a floating-point tensor with one",
        ),
        (
            (Q, Q, Q, lambda x, b, h, i, j: i),
            {},
            "score_mod: expected a function that returns a floating-point tensor with one",
        ),
        ((Q, Q, Q, lambda x, b, h, i, j: x.expand(2)), {}, "got torch.float32 of shape (2,)"),
        (
            (Q, Q, Q, None, lambda b, h, i, j: True),
            {},
            "mask_mod: expected a function that returns a boolean tensor with one number",
        ),
        (
            (Q, Q, Q, None, lambda b, h, i, j: i),
            {},
            "mask_mod: expected a function that returns a boolean tensor with one number",
        ),
        (
            (Q, Q, Q, lambda x, b, h, i, j: (2 * x.tanh(), x)),
            {},
            "got tuple; use torch functions of the indices",
        ),
        ((Q, Q, Q, lambda x, b, h, i, j: x if i > j else 2 * x), {}, "score_mod: expected torch functions of the"),
        ((Q, Q, Q, lambda x, b, h, i, j: x * float(i)), {}, "use torch.where(i > j, a, b)"),
        (
            (Q, Q, Q, None, lambda b, h, i, j: i >= 0 if i > j else j < 0),
            {},
            "mask_mod: expected torch functions of the",
        ),
        ((Q, Q, Q), {"block_mask": torch.ones(5, 5)}, "block_mask: expected None or torch.nn.attention"),
        ((Q, Q, Q), {"block_mask": MASK}, "5 queries and 5 keys, got (1, 1, 5, 7); create_block_mask(mask_mod, B, H"),
        ((Q, Q, Q), {"scale": "x"}, "scale: expected a number or None, got 'x'"),
        ((Q, Q, Q), {"return_lse": 1}, "return_lse: expected"),
    ],
)
def test_rejects_bad_arguments(arguments, options, message):
    with pytest.raises(InputError, match=re.escape(message)):
        flex_attention(*arguments, **options)


def test_rejects_block_mask_with_too_few_blocks():
    lists = torch.tensor([[[1]]], dtype=torch.int32), torch.tensor([[[[0]]]], dtype=torch.int32)
    short = BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=4, seq_lengths=(5, 5))
    with pytest.raises(InputError, match="expected blocks of 4 queries for 5 queries, got 1 of them"):
        flex_attention(Q, Q, Q, block_mask=short)


def test_rejects_vmapped_block_masks():
    tables = create_block_mask(causal, None, None, 5, 5, device="cpu", BLOCK_SIZE=2)

    def f(indices):
        mask = BlockMask.from_kv_blocks(tables.kv_num_blocks, indices, BLOCK_SIZE=2, seq_lengths=(5, 5))
        return flex_attention(Q, Q, Q, block_mask=mask)

    with pytest.raises(InputError, match="expected one block mask for all rows"):
        torch.func.vmap(f)(tables.kv_indices[None])
