"""Torch's `flex_attention` inside `corrected()`: its values, and derivatives that torch does not support."""

import inspect
import math
from types import SimpleNamespace

import pytest
import torch
from drawing import draw
from torch.nn.attention import flex_attention as room
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

import hodiff
from hodiff.errors import RouteError
from hodiff.torch_internals.interception import flex_operator

pytestmark = pytest.mark.filterwarnings(
    "ignore:flex_attention called:UserWarning", "ignore:return_lse is:FutureWarning"
)
LENGTH, KEYS = 5, 7


def drawn(heads=2, shared=2, batch=2, dtype=torch.float64):
    shapes = (batch, heads, LENGTH, 2), (batch, shared, KEYS, 2), (batch, shared, KEYS, 1)
    return [draw(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate(shapes)]


TABLE = draw(4, LENGTH + KEYS, seed=5)


def biased(score, b, h, i, j):
    return score + TABLE[h, i - j + KEYS - 1]


def capped(score, b, h, i, j):
    return 0.5 * torch.tanh(score / 0.5)


def causal(b, h, i, j):
    return i >= j


def blind(b, h, i, j):
    return (i >= j) & (i != 2)


def blocks(function):
    return create_block_mask(function, None, None, LENGTH, KEYS, device="cpu", BLOCK_SIZE=2)


CALLS = {
    "bias": (drawn(), {"score_mod": biased}),
    "bias, causal": (drawn(), {"score_mod": biased, "block_mask": blocks(causal)}),
    "blind rows": (drawn(), {"score_mod": capped, "block_mask": blocks(blind)}),
    "shared heads": (drawn(4, 2), {"score_mod": capped, "enable_gqa": True, "scale": 0.3}),
    "float32": (drawn(dtype=torch.float32), {"score_mod": capped}),
    "no functions": (drawn(), {"kernel_options": {"BLOCK_M": 32}}),
}
QUICK = "bias, causal"
OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in CALLS if name != QUICK]


@pytest.mark.parametrize("name", [QUICK, *OTHERS])
def test_values_match_torch(name):
    inputs, options = CALLS[name]
    with torch.no_grad():
        expected = flex_attention(*inputs, **options)
        exponents = flex_attention(*inputs, **options, return_lse=True)[1]
    with hodiff.corrected():
        got, aux = flex_attention(*inputs, **options, return_aux=AuxRequest(lse=True, max_scores=True))
        alone = flex_attention(*inputs, **options)
        _, again = flex_attention(*inputs, **options, return_lse=True)
    for one, other in ((got, expected), (alone, expected), (aux.lse, exponents), (again, exponents)):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other)
    assert aux.max_scores.shape == exponents.shape


def test_max_scores_match_primitives():
    """Torch does not return them on a CPU."""
    q, k, v = drawn()
    with hodiff.corrected():
        _, aux = flex_attention(q, k, v, capped, return_aux=AuxRequest(max_scores=True))
    assert aux.lse is None
    torch.testing.assert_close(aux.max_scores, (0.5 * torch.tanh(q @ k.mT / math.sqrt(2) / 0.5)).amax(-1))


def by_primitives(q, k, v, table):
    places = torch.arange(LENGTH)[:, None] - torch.arange(KEYS)
    scores = q @ k.mT / math.sqrt(2) + table[:, places + KEYS - 1]
    return torch.softmax(scores.masked_fill(places < 0, -math.inf), -1) @ v


def flex_with_bias(q, k, v, table):
    return flex_attention(q, k, v, lambda s, b, h, i, j: s + table[h, i - j + KEYS - 1], blocks(causal))


@pytest.mark.parametrize("route", hodiff.ROUTES)
def test_hvp_matches_primitives_by_every_route(route):
    inputs = (*drawn(), TABLE[:2])
    v = tuple(torch.ones_like(x) for x in inputs)
    found, expected = (
        hodiff.hvp(lambda x, f=f: f(*x).square().sum(), inputs, v, route=route) for f in (flex_with_bias, by_primitives)
    )
    torch.testing.assert_close(found, expected)


def test_autograd_second_derivatives_match_primitives():
    leaves = [x.clone().requires_grad_() for x in (*drawn(), TABLE[:2])]

    def penalty(f):
        gradients = torch.autograd.grad(f(*leaves).square().sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(each.square().sum() for each in gradients), leaves)

    with hodiff.corrected():
        found = penalty(flex_with_bias)
    torch.testing.assert_close(found, penalty(by_primitives))


@pytest.mark.slow
def test_derivatives_match_differences():
    """The tests of the Function compare third derivatives."""
    q, k, v = (x[:1, :, :3] for x in drawn(1, 1))
    f = hodiff.corrected()(lambda q, k, v: flex_attention(q, k, v, capped))
    hodiff.assert_differentiable(f, (q, k, v), scipy=False)


def test_gradient_of_logsumexp_output_matches():
    q, k, v = drawn()
    with hodiff.corrected():
        found = torch.func.grad(lambda q: flex_attention(q, k, v, capped, return_lse=True)[1].square().sum())(q)

    def expected(q):
        return torch.logsumexp(0.5 * torch.tanh(q @ k.mT / math.sqrt(2) / 0.5), -1).square().sum()

    torch.testing.assert_close(found, torch.func.grad(expected)(q))


def test_torch_is_unchanged_outside_corrected():
    q, k, v = drawn()
    with pytest.raises(NotImplementedError, match="does not support backward on CPU"):
        flex_attention(q.requires_grad_(), k, v)
    assert list(inspect.signature(flex_attention).parameters)[:4] == ["query", "key", "value", "score_mod"]
    assert flex_attention is room.flex_attention


def test_mixed_dtypes_are_accepted():
    q, k, v = drawn()
    with hodiff.corrected():
        assert flex_attention(q.float(), k.bfloat16(), v.bfloat16()).dtype == torch.float32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key": draw(2, 2, KEYS, 3)}, r"hodiff's rule does not support the call: flex_attention: expected q \(B, H"),
        ({"query": draw(2, LENGTH, 2).requires_grad_()}, r"expected q \(B, H, L, E\)"),
        ({"block_mask": create_block_mask(causal, None, None, 9, 9, device="cpu")}, "5 queries and 7 keys, got"),
        ({"score_mod": lambda s, b, h, i, j: 1.0}, "score_mod: expected a function that returns"),
        ({"scale": torch.tensor(0.3, requires_grad=True)}, "scale: expected a number"),
    ],
)
def test_rejects_unsupported_arguments(change, message):
    q, k, v = drawn()
    arguments = {"query": q.requires_grad_(), "key": k, "value": v, **change}
    with hodiff.corrected(), pytest.raises(RouteError, match=message):
        flex_attention(**arguments)


def test_operator_of_exported_programs_matches():
    """An exported program passes closed-over tensors to the operator as arguments."""
    q, k, v = drawn()
    mask = blocks(causal)

    def score_mod(score, b, h, i, j, table):
        return score + table[h, i - j + KEYS - 1]

    def f(q, k, v, table):
        with hodiff.corrected():
            output, exponents, _ = flex_operator(
                q, k, v, score_mod, mask.as_tuple(), 1 / math.sqrt(2), {}, (table,), ()
            )
        return output * exponents[..., None] * math.log(2)

    def expected(q, k, v, table):
        places = torch.arange(LENGTH)[:, None] - torch.arange(KEYS)
        scores = q @ k.mT / math.sqrt(2) + table[:, places + KEYS - 1]
        scores = scores.masked_fill(places < 0, -math.inf)
        return torch.softmax(scores, -1) @ v * scores.logsumexp(-1, keepdim=True)

    inputs = (*drawn(), TABLE[:2])
    found, truth = (torch.func.hessian(lambda t, g=g: g(q, k, v, t).square().sum())(TABLE[:2]) for g in (f, expected))
    torch.testing.assert_close(found, truth)
    torch.testing.assert_close(f(*inputs), expected(*inputs))


@pytest.mark.slow
@pytest.mark.parametrize("fullgraph", [False, True])
def test_compiled_call_matches(fullgraph):
    torch.compiler.reset()  # the compiler permanently skips a function that it met inside a transform
    q, k, v = drawn()
    mask = blocks(causal)
    compiled = torch.compile(lambda q: flex_attention(q, k, v, biased, mask), backend="aot_eager", fullgraph=fullgraph)
    leaf = q.clone().requires_grad_()
    with hodiff.corrected():
        (found,) = torch.autograd.grad(compiled(leaf).square().sum(), leaf)
    expected = lambda q: by_primitives(q, k, v, TABLE[:2]).square().sum()  # noqa: E731
    torch.testing.assert_close(found, torch.func.grad(expected)(q))
    if fullgraph:  # torch refuses full graphs inside its transforms
        return
    product = hodiff.hvp(lambda q: compiled(q).square().sum(), q, q)
    torch.testing.assert_close(product, hodiff.hvp(expected, q, q))


@pytest.mark.slow
def test_compiled_hvp_matches():
    q, k, v = drawn()
    mask = blocks(causal)

    def loss(q):
        return flex_attention(q, k, v, biased, mask).square().sum()

    found = torch.compile(lambda q, v: hodiff.hvp(loss, q, v), backend="aot_eager")(q, q)
    torch.testing.assert_close(found, hodiff.hvp(lambda q: by_primitives(q, k, v, TABLE[:2]).square().sum(), q, q))


def test_torch_function_objects_receive_the_call():
    calls = []

    class Standing(SimpleNamespace):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            calls.append(func)
            return 3

    assert flex_attention(Standing(), None, None) == 3
    assert calls == [flex_attention]
