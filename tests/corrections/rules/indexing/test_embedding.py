"""Embedding bags: torch's values, gradients and errors, and correct derivatives by every route."""

import pytest
import torch
import torch.nn.functional as F
from corrections.against_torch import same_value
from corrections.contract import Contract
from drawing import draw
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import hodiff

D = torch.float64
corrected = hodiff.corrected()

ROWS = torch.tensor([1, 3, 1, 0, 2, 3])
PAIRS = ROWS.reshape(2, 3)
OFFSETS = torch.tensor([0, 2, 2, 5])  # the second bag is empty


def bags(mode, **options):
    return lambda w: F.embedding_bag(ROWS, w, OFFSETS, mode=mode, **options)


CALLS = {
    **{mode: (bags(mode), (draw(4, 2),)) for mode in ("sum", "mean", "max")},
    **{f"{mode}, padded": (bags(mode, padding_idx=-1), (draw(4, 2),)) for mode in ("sum", "mean", "max")},
    "last offset": (
        lambda w: F.embedding_bag(ROWS, w, torch.tensor([0, 2, 2, 6]), mode="max", include_last_offset=True),
        (draw(4, 2),),
    ),
    "rows": (lambda w: F.embedding_bag(PAIRS, w, mode="mean", padding_idx=0), (draw(4, 2),)),
    "weights": (
        lambda w, s: F.embedding_bag(ROWS, w, OFFSETS, mode="sum", per_sample_weights=s),
        (draw(4, 2), draw(6, seed=1)),
    ),
    "rows, weights": (
        lambda w, s: F.embedding_bag(PAIRS, w, mode="sum", per_sample_weights=s, padding_idx=1),
        (draw(4, 2), draw(2, 3, seed=1)),
    ),
    "torch, weights": (
        lambda w, s: torch.embedding_bag(w, ROWS, OFFSETS, False, 0, False, s)[0],
        (draw(4, 2), draw(6, seed=1)),
    ),
    "torch, maximum": (lambda w: torch.embedding_bag(w, ROWS, OFFSETS.int().long(), False, 2)[0], (draw(4, 2),)),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_values_and_gradients_match_torch(name, dtype):
    function, inputs = CALLS[name]
    leaves = [each.to(dtype).requires_grad_() for each in inputs]

    def results():
        value = function(*leaves)
        cotangent = draw(*value.shape, seed=2).to(dtype)
        return value, *torch.autograd.grad(value, leaves, cotangent)

    same_value(results)


def test_mixed_derivatives_by_per_sample_weights_match_closed_form():
    """The mixed derivative of a weighted sum by row and weight is 1."""
    w, s = draw(4, 2), draw(6, seed=1)

    def mixed(s):
        return torch.func.grad(lambda w: F.embedding_bag(ROWS, w, OFFSETS, mode="sum", per_sample_weights=s).sum())(w)

    with corrected:
        for jacobian in (torch.func.jacrev, torch.func.jacfwd):
            expected = F.one_hot(ROWS, 4).mT.unsqueeze(1).expand(4, 2, 6).to(D)
            torch.testing.assert_close(jacobian(mixed)(s), expected)


def test_first_of_equal_maxima_gets_the_gradient():
    w = torch.ones(4, 1, dtype=D, requires_grad=True)
    (expected,) = torch.autograd.grad(bags("max")(w).sum(), w)
    with corrected:
        torch.testing.assert_close(torch.autograd.grad(bags("max")(w).sum(), w)[0], expected)


def test_maximum_of_nan_is_nan():
    w = draw(4, 2)
    w[3, 0] = float("nan")
    with corrected:
        assert bags("max")(w).isnan().tolist() == [[True, False], [False, False], [False, False], [True, False]]


def test_other_outputs_match_torch():
    expected = torch.embedding_bag(draw(4, 2), ROWS, OFFSETS, mode=2)
    with corrected:
        torch.testing.assert_close(torch.embedding_bag(draw(4, 2), ROWS, OFFSETS, mode=2), expected)


def test_sparse_gradients_are_left_to_torch():
    module = nn.EmbeddingBag(4, 2, dtype=D, sparse=True)
    with corrected:
        names = {module(PAIRS).grad_fn.name()}
    assert names == {"EmbeddingBagBackward0"}


def embedded(**options):
    return lambda w: F.embedding(ROWS, w, **options)


def by_operator(weight):
    return torch.embedding(weight, ROWS, scale_grad_by_freq=True)


REFUSED = {
    "embedding, scaled": (embedded(scale_grad_by_freq=True), "scale_grad_by_freq"),
    "embedding, padded and scaled": (embedded(scale_grad_by_freq=True, padding_idx=0), "scale_grad_by_freq"),
    "embedding, max_norm": (embedded(max_norm=0.5), "max_norm=0.5"),
    "operator, scaled": (by_operator, "scale_grad_by_freq"),
    "captured, scaled": (lambda w: torch.ops.aten.embedding(w, ROWS, -1, True), "scale_grad_by_freq"),
    "bag, scaled": (bags("sum", scale_grad_by_freq=True), "scale_grad_by_freq"),
    "bag, max_norm": (bags("mean", max_norm=0.5), "max_norm=0.5"),
}
DERIVATIVES = {
    **{route: lambda f, w, r=route: hodiff.hvp(f, w, w, route=r) for route in hodiff.ROUTES},
    "hessian": lambda f, w: hodiff.hessian(f)(w),
    "hessian_matrix": hodiff.hessian_matrix,
    "gradient and product": lambda f, w: hodiff.grad_and_hvp(f, w, w),
    "jacobian": lambda f, w: hodiff.jacobian(f)(w),
    "torch": lambda f, w: corrected(torch.func.grad)(f)(w),
    "backward": lambda f, w: corrected(f)(w.requires_grad_()).backward(),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("derivative", DERIVATIVES)
def test_options_without_derivatives_are_refused(name, derivative):
    lookup, option = REFUSED[name]
    weight, take = draw(4, 2) + 1, DERIVATIVES[derivative]
    before = weight.clone()
    with pytest.raises(hodiff.RouteError, match=f"embedding.*: expected .*{option}"):
        take(corrected(lambda w: lookup(w).tanh().sum()), weight)
    assert torch.equal(weight.detach(), before)  # which max_norm would change


@pytest.mark.parametrize("capture", ["export", "make_fx", "trace"])
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:Warning")
def test_captured_max_norm_is_refused_and_leaves_the_weight(capture):
    """A program captures the change of the weight as an operator on a detached tensor."""

    class Lookup(nn.Module):
        def forward(self, w):
            return F.embedding(ROWS, w, max_norm=0.5).tanh().sum()

    weight, v = draw(4, 2) + 1, draw(4, 2, seed=1)
    program = {
        "export": lambda: torch.export.export(Lookup(), (weight.clone(),)).module(),
        "make_fx": lambda: make_fx(Lookup())(weight.clone()),
        "trace": lambda: torch.jit.trace(Lookup(), (weight.clone(),), check_trace=False),
    }[capture]()
    before = weight.clone()
    for route in hodiff.ROUTES:
        with pytest.raises(hodiff.RouteError, match="embedding: expected rows"):
            hodiff.hvp(program, weight, v, route=route)
    assert torch.equal(weight, before)
    if capture == "make_fx" and torch.__version__ >= "2.15":
        return  # its graph writes to an alias instead of a detached weight, which torch refuses
    assert set(hodiff.preflight(program, weight).routes.values()) == {"raises"}


@pytest.mark.slow
def test_compiled_product_with_max_norm_is_refused():
    weight = draw(4, 2) + 1
    product = torch.compile(
        lambda w: hodiff.hvp(lambda w: embedded(max_norm=0.5)(w).sin().sum(), w, w), backend="eager"
    )
    with pytest.raises(hodiff.RouteError, match="embedding: expected rows"):
        product(weight)


@pytest.mark.parametrize("name", REFUSED)
def test_options_are_torchs_where_nothing_is_differentiated(name):
    lookup, _ = REFUSED[name]
    same_value(lambda: lookup(draw(4, 2) + 1))

    def of_another(x):  # by which the derivatives are right
        return (lookup((draw(4, 2) + 1).requires_grad_()) * x).sin().sum()

    x = draw(2)
    expected = -(lookup(draw(4, 2) + 1) ** 2 * (lookup(draw(4, 2) + 1) * x).sin()).sum(0) * x
    torch.testing.assert_close(hodiff.hvp(of_another, x, x), expected)


@pytest.mark.parametrize("route", hodiff.ROUTES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_rows_within_max_norm_are_differentiated(route, dtype):
    weight = (draw(4, 2) + 1).to(dtype)
    F.embedding(torch.arange(4), weight, max_norm=0.5)  # as one call does, up to rounding
    v = draw(4, 2, seed=1).to(dtype)
    counts = torch.bincount(ROWS, minlength=4).unsqueeze(-1)
    for lookup in (embedded(max_norm=0.5), lambda w: F.embedding_bag(ROWS, w, torch.arange(6), max_norm=0.5)):
        product = hodiff.hvp(lambda w, f=lookup: f(w).pow(3).sum(), weight, v, route=route)
        torch.testing.assert_close(product, 6 * counts * weight * v)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_indices_after_the_last_offset_match_torch(mode):
    def f():
        return F.embedding_bag(ROWS, draw(4, 2), torch.tensor([0, 2, 5]), mode=mode, include_last_offset=True)

    same_value(f, rtol=0, atol=0)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_no_indices_give_zeros(mode):
    def f():
        return F.embedding_bag(ROWS[:0], weight, torch.tensor([0, 0]), mode=mode)

    weight = draw(4, 2).requires_grad_()
    with corrected:
        assert torch.equal(f(), torch.zeros(2, 2, dtype=D))
        (gradient,) = torch.autograd.grad(f().sum(), weight)
    assert torch.equal(gradient, torch.zeros(4, 2, dtype=D))


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_decreasing_offsets_match_torch(mode):
    def f():
        return F.embedding_bag(ROWS, draw(4, 2), torch.tensor([0, 4, 2]), mode=mode)

    same_value(f, equal_nan=True)


WRONG = {
    "index": lambda w: F.embedding_bag(ROWS + 1, w, OFFSETS),
    "offsets": lambda w: F.embedding_bag(ROWS, w),
    "offsets of rows": lambda w: F.embedding_bag(PAIRS, w, OFFSETS),
    "first offset": lambda w: F.embedding_bag(ROWS, w, OFFSETS + 1),
    "mode": lambda w: F.embedding_bag(ROWS, w, OFFSETS, mode="median"),
    "weights of a mean": lambda w: F.embedding_bag(ROWS, w, OFFSETS, per_sample_weights=draw(6)),
    "shape of weights": lambda w: F.embedding_bag(ROWS, w, OFFSETS, mode="sum", per_sample_weights=draw(5)),
    "dimensions": lambda w: F.embedding_bag(ROWS, w[0], OFFSETS),
    "padding": lambda w: F.embedding_bag(ROWS, w, OFFSETS, padding_idx=4),
    "last offset": lambda w: F.embedding_bag(ROWS, w, torch.tensor([0, 7])),
    "dtype of weights": lambda w: F.embedding_bag(
        ROWS, w, OFFSETS, mode="sum", per_sample_weights=torch.ones(len(ROWS), dtype=torch.float32)
    ),
    "rows without columns": lambda w: F.embedding_bag(PAIRS[:, :0], w, mode="max"),
}


@pytest.mark.parametrize("route", hodiff.ROUTES)
def test_padding_row_is_constant(route):
    """Torch alone gives the row a tangent and no gradient."""
    weight = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(4, 3)
    indices = torch.tensor([0, 2, 0, 3])

    def padded(weight, padding_idx=0):
        return F.embedding(indices, weight, padding_idx=padding_idx).sum(0).pow(3).sum()

    def by_hand(weight):
        rows = torch.cat([weight[:1].detach(), weight[1:]])
        return rows[indices].sum(0).pow(3).sum()

    v = torch.ones_like(weight)
    expected = hodiff.hvp(by_hand, weight, v, route=route, correct=False)
    torch.testing.assert_close(hodiff.hvp(padded, weight, v, route=route), expected)
    torch.testing.assert_close(hodiff.hvp(lambda w: padded(w, -4), weight, v, route=route), expected)
    assert not expected[0].any()


@pytest.mark.parametrize("options", [{"max_norm": 1.0}, {"max_norm": 1.0, "norm_type": 1.0}, {"sparse": True}])
@pytest.mark.parametrize("route", hodiff.ROUTES)
def test_padding_row_is_constant_with_options(options, route):
    weight = torch.linspace(-0.3, 0.3, 12, dtype=D).reshape(4, 3)
    indices = torch.tensor([0, 2, 0, 3])

    def padded(weight):
        return F.embedding(indices, weight, padding_idx=0, **options).sum(0).pow(3).sum()

    def by_hand(weight):
        return torch.cat([weight[:1].detach(), weight[1:]])[indices].sum(0).pow(3).sum()

    v = torch.ones_like(weight)
    if options.get("sparse") and route == "forward-over-reverse":
        with pytest.raises(hodiff.RouteError, match="does not implement"):
            hodiff.hvp(padded, weight, v, route=route)
        return
    expected = hodiff.hvp(by_hand, weight, v, route=route, correct=False)
    product = hodiff.hvp(padded, weight, v, route=route)
    torch.testing.assert_close(product.to_dense() if product.is_sparse else product, expected)


@pytest.mark.parametrize("route", hodiff.ROUTES)
def test_builtin_embedding_keeps_the_padding_row_constant(route):
    weight, indices, v = draw(4, 3), torch.tensor([[0, 2], [2, 3]]), draw(4, 3, seed=1)
    mask = torch.tensor([1.0, 1.0, 0.0, 1.0], dtype=D).unsqueeze(-1)
    got = hodiff.hvp(lambda w: torch.embedding(w, indices, 2).pow(3).sum(), weight, v, route=route)
    torch.testing.assert_close(got, 6 * torch.tensor([[1.0], [0], [0], [1]], dtype=D) * weight * v * mask)


def curved(function):
    return lambda *x: function(*x).sin()


CURVED = {name: (curved(function), inputs) for name, (function, inputs) in CALLS.items()}


class TestContract(Contract):
    cases = CURVED
    order = 3
    quick, one_in = ("mean, padded", "max", "weights", "torch, weights"), 4
    errors, error_inputs = WRONG, (draw(4, 2),)
