"""Tests of the cross-entropy of linear logits: options, tiles, memory, vmap, dtypes, and refused arguments."""

import math
import re

import pytest
import torch
import torch.nn.functional as F
from drawing import draw_each
from functions.cases.losses import linear_reference
from hypothesis import given
from hypothesis import strategies as st
from memory_use import LiveMemory

import hodiff
from hodiff.checks import derivative, route_names
from hodiff.errors import InputError
from hodiff.functions import linear_cross_entropy
from hodiff.functions.losses.linear_terms import tiles
from hodiff.functions.losses.linear_terms.term_formulas import Options
from hodiff.functions.losses.linear_terms.terms import LinearCrossEntropy, LinearCrossEntropyGradient
from hodiff.rules import blockwise

D = torch.float64
SAMPLES, SIZE, CLASSES = 5, 2, 7
TARGET = torch.tensor([3, 0, -100, 6, 3])
WEIGHT = torch.linspace(0.5, 2, CLASSES, dtype=D)


INPUTS = draw_each((SAMPLES, SIZE), (CLASSES, SIZE), (CLASSES,))


def use_tiles(patch, samples=2, classes=3):
    """Use small tiles, so that small inputs have several, and blocks of two samples beyond second order."""
    patch.setattr(tiles, "WHOLE", 0)
    patch.setattr(tiles, "TILE", {"cuda": samples * classes})
    patch.setattr(tiles, "SAMPLES", {"cuda": samples})
    patch.setattr(blockwise, "BLOCK", 1)
    patch.setattr(blockwise, "FEWEST_ROWS", 2)


@pytest.fixture
def small_tiles(monkeypatch):
    use_tiles(monkeypatch)


def fused_loss(
    target=TARGET, reduction="mean", weight=None, smoothing=0.0, z_loss=0.0, softcap=None, ignore_index=-100
):
    return lambda x, w, bias: linear_cross_entropy(
        x,
        w,
        target,
        linear_bias=bias,
        weight=weight,
        reduction=reduction,
        ignore_index=ignore_index,
        label_smoothing=smoothing,
        z_loss=z_loss,
        softcap=softcap,
    )


def reference(target=TARGET, reduction="mean", **options):
    def loss(x, w, bias):
        losses, each = linear_reference(x, w, target, bias, **options)
        return {"none": losses, "sum": losses.sum(), "mean": losses.sum() / each.sum()}[reduction]

    return loss


def contracted(f, inputs):
    """Return a nonlinear scalar function of all inputs as one vector, the point, and a direction."""
    sizes = [each.numel() for each in inputs]

    def phi(flat):
        y = f(*(part.reshape(each.shape) for part, each in zip(flat.split(sizes), inputs, strict=True)))
        return (y * torch.linspace(0.5, 1.5, y.numel(), dtype=y.dtype).reshape(y.shape)).sum() + y.square().sum()

    point = torch.cat([each.reshape(-1) for each in inputs])
    return phi, point, torch.linspace(-1, 1, point.numel(), dtype=point.dtype)


def all_derivatives(f, inputs, third=()):
    """Return the value, the gradient, one product by each route, and the gradients of some of these products."""
    phi, point, v = contracted(f, inputs)
    products = [derivative(phi, name)(point, v) for name in route_names(2)]
    gradients = [torch.func.grad(lambda x, name=name: _energy(derivative(phi, name)(x, v)))(point) for name in third]
    return [f(*inputs), torch.func.grad(phi)(point), *products, *gradients]


def _energy(product):
    return product.square().sum()


def assert_same(a, b, tolerance=1e-12):
    for x, y in zip(a, b, strict=True):
        assert x.shape == y.shape
        torch.testing.assert_close(x, y, rtol=0, atol=tolerance * max(1.0, float(y.detach().abs().max())))


OPTIONS = {
    "plain": {},
    "weighted": {"weight": WEIGHT},
    "smoothed": {"smoothing": 0.2},
    "weighted and smoothed": {"weight": WEIGHT, "smoothing": 0.2, "reduction": "none"},
    "square of log-sum-exp": {"z_loss": 0.3, "weight": WEIGHT},
    "capped": {"softcap": 0.8, "reduction": "sum"},
    "all": {"weight": WEIGHT, "smoothing": 0.1, "z_loss": 0.1, "softcap": 1.5, "reduction": "none", "ignore_index": 3},
}


@pytest.mark.one_in(18)
@pytest.mark.parametrize("tiled", [False, True], ids=["whole", "tiles"])
@pytest.mark.parametrize("name", OPTIONS)
def test_second_derivatives_match_primitives(name, tiled, monkeypatch):
    if tiled:
        use_tiles(monkeypatch)
    options = OPTIONS[name]
    target = TARGET.clamp(min=0) if "ignore_index" in options else TARGET
    assert_same(
        all_derivatives(fused_loss(target, **options), INPUTS), all_derivatives(reference(target, **options), INPUTS)
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "all"])
def test_third_derivatives_match_primitives(name, small_tiles):
    options = OPTIONS[name]
    target, routes = TARGET.clamp(min=0), route_names(2)
    expected = all_derivatives(reference(target, **options), INPUTS, third=routes)
    assert_same(all_derivatives(fused_loss(target, **options), INPUTS, third=routes), expected)


@pytest.mark.slow
def test_third_derivatives_match_differences(small_tiles):
    inputs = draw_each((3, 1), (4, 1), (4,))
    function = fused_loss(torch.tensor([3, 0, 1]), smoothing=0.2, z_loss=0.1, softcap=2.0)
    hodiff.assert_differentiable(function, inputs, order=3, scipy=False)


@given(
    st.tuples(*(st.integers(1, 6),) * 3),
    st.tuples(st.integers(1, 4), st.integers(1, 4)),
    st.sampled_from(["mean", "sum", "none"]),
    st.sampled_from([0.0, 0.3]),
    st.sampled_from([0.0, 0.2]),
    st.sampled_from([None, 1.1]),
    st.booleans(),
    st.integers(0, 2**20),
)
def test_any_shape_tile_and_options_match_primitives(
    sizes, tile, reduction, smoothing, z_loss, softcap, weighted, seed
):
    samples, size, classes = sizes
    inputs = draw_each((samples, size), (classes, size), (classes,), seed=seed)
    generator = torch.Generator().manual_seed(seed)
    target = torch.randint(classes, (samples,), generator=generator)
    target[1::3] = -100
    weight = WEIGHT[:classes] if weighted else None
    options = {"weight": weight, "smoothing": smoothing, "z_loss": z_loss, "softcap": softcap, "reduction": reduction}
    with pytest.MonkeyPatch.context() as patch:
        use_tiles(patch, *tile)
        results = []
        for f in (fused_loss(target, **options), reference(target, **options)):
            leaves = [each.clone().requires_grad_() for each in inputs]
            value = f(*leaves)
            first = torch.autograd.grad(_energy(value), leaves, create_graph=True)
            second = torch.autograd.grad(sum(map(_energy, first)), leaves)
            results.append([value, *first, *second])
    assert_same(*results)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weight", [None, WEIGHT], ids=["plain", "weighted"])
def test_value_matches_torch_cross_entropy(reduction, weight, small_tiles):
    x, w, bias = INPUTS
    expected = F.cross_entropy(x @ w.T + bias, TARGET, weight=weight, reduction=reduction, label_smoothing=0.2)
    value = linear_cross_entropy(
        x, w, TARGET, linear_bias=bias, weight=weight, reduction=reduction, label_smoothing=0.2
    )
    torch.testing.assert_close(value, expected)


def test_hessian_matches_closed_form():
    """The loss of one feature and two classes is softplus, and its Hessian is the logistic curvature."""
    x, w = torch.tensor([[1.5]], dtype=D), torch.tensor([[0.0], [0.7]], dtype=D)
    p = 1 / (1 + math.exp(-1.05))
    target = torch.tensor([1])
    loss = linear_cross_entropy(x, w, target)
    assert float(loss) == pytest.approx(-math.log(p))
    hessian = hodiff.hessian(lambda w: linear_cross_entropy(x, w, target))(w).squeeze()
    expected = 1.5**2 * p * (1 - p) * torch.tensor([[1.0, -1.0], [-1.0, 1.0]], dtype=D)
    torch.testing.assert_close(hessian, expected)


def test_leading_dimensions_and_single_samples_are_accepted(small_tiles):
    x, w, bias = draw_each((2, 3, 2), (7, 2), (7,))
    target = torch.arange(6).reshape(2, 3)
    rows = linear_cross_entropy(x.reshape(6, 2), w, target.reshape(6), linear_bias=bias, reduction="none")
    losses = linear_cross_entropy(x, w, target, linear_bias=bias, reduction="none")
    torch.testing.assert_close(losses, rows.reshape(2, 3))
    one = linear_cross_entropy(x[0, 1], w, target[0, 1], linear_bias=bias, reduction="none")
    torch.testing.assert_close(one, losses[0, 1])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("tiled", [False, True], ids=["whole", "tiles"])
def test_non_finite_ignored_samples_do_not_affect_others(tiled, monkeypatch):
    """Infinities and NaN in ignored samples change neither the value nor the derivatives of other samples."""
    if tiled:
        use_tiles(monkeypatch)
    x, w, bias = INPUTS
    counted = TARGET != -100
    expected = all_derivatives(fused_loss(TARGET[counted]), (x[counted], w, bias))
    x = x.clone()
    x[2, 0], x[2, 1] = math.inf, math.nan
    leaves = [each.clone().requires_grad_() for each in (x, w, bias)]
    value = fused_loss()(*leaves)
    first = torch.autograd.grad(value, leaves, create_graph=True)
    assert_same([value], expected[:1])
    assert not first[0][2].any()
    second = torch.autograd.grad(sum(map(_energy, first)), leaves)
    assert not second[0][2].any()
    clean = [each.clone().requires_grad_() for each in (INPUTS[0][counted], w, bias)]
    clean_first = torch.autograd.grad(fused_loss(TARGET[counted])(*clean), clean, create_graph=True)
    clean_second = torch.autograd.grad(sum(map(_energy, clean_first)), clean)
    assert_same([first[0][counted], *first[1:]], clean_first)
    assert_same([second[0][counted], *second[1:]], clean_second)


@pytest.mark.parametrize("softcap", [None, 1.2])
def test_cotangents_of_ignored_samples_match(softcap, monkeypatch):
    """Tiles and all logits agree if the Function gets a cotangent for ignored samples, which the loss never passes."""
    x, w, bias = INPUTS
    (g,) = draw_each((SAMPLES, 3), seed=1)
    options = Options(-100, softcap, True)

    def gradients(x, w, bias, g):
        column, index = bias[:, None], TARGET[:, None]
        terms = LinearCrossEntropy.call(x, w, column, WEIGHT[:, None], index, options)
        return LinearCrossEntropyGradient.call(
            x, w, column, WEIGHT[:, None], index, terms[:, :1].detach(), g, options, (True, True, True)
        )

    inputs = (x, w, bias, g)
    expected = torch.func.jvp(gradients, inputs, tuple(map(torch.cos, inputs)))
    use_tiles(monkeypatch)
    found = torch.func.jvp(gradients, inputs, tuple(map(torch.cos, inputs)))
    for ours, whole in zip(found, expected, strict=True):
        assert_same(ours, whole)
        assert not ours[0][2].any()


@pytest.mark.parametrize("tiled", [False, True], ids=["whole", "tiles"])
@pytest.mark.parametrize("samples", [0, 3])
def test_no_counted_sample_gives_nan_mean_and_zero_sum(samples, tiled, monkeypatch):
    if tiled:
        use_tiles(monkeypatch)
    inputs = [each.requires_grad_() for each in draw_each((samples, 2), (4, 2), (4,))]
    target = torch.full((samples,), -100)
    assert fused_loss(target)(*inputs).isnan()
    total = fused_loss(target, reduction="sum", smoothing=0.1, z_loss=0.1)(*inputs)
    assert total == 0
    gradients = torch.autograd.grad(total, inputs, create_graph=True)
    for each, like in zip(gradients, inputs, strict=True):
        assert each.shape == like.shape
        assert not each.any()
    for each in torch.autograd.grad(sum(map(_energy, gradients)), inputs, allow_unused=True, materialize_grads=True):
        assert not each.any()
    (by_x,) = torch.autograd.grad(fused_loss(target)(*inputs), inputs[:1])
    assert not by_x.any()


def test_one_class_has_zero_loss(small_tiles):
    inputs = draw_each((3, 2), (1, 2), (1,))
    target = torch.zeros(3, dtype=torch.int64)
    assert_same(
        all_derivatives(fused_loss(target, z_loss=0.5), inputs), all_derivatives(reference(target, z_loss=0.5), inputs)
    )
    assert fused_loss(target)(*inputs) == 0


@pytest.mark.parametrize("tiled", [False, True], ids=["whole", "tiles"])
def test_no_features_match_bias_only(tiled, monkeypatch):
    if tiled:
        use_tiles(monkeypatch)
    bias = INPUTS[2].clone().requires_grad_()
    value = fused_loss()(torch.zeros(SAMPLES, 0, dtype=D), torch.zeros(CLASSES, 0, dtype=D), bias)
    expected = F.cross_entropy(bias.expand(SAMPLES, CLASSES), TARGET)
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(torch.autograd.grad(value, bias), torch.autograd.grad(expected, bias))


def test_large_logits_do_not_overflow(small_tiles):
    x, w, bias = (1e4 * each for each in INPUTS)
    value = fused_loss()(x, w, bias)
    torch.testing.assert_close(value, F.cross_entropy(x @ w.T + bias, TARGET))
    assert bool(torch.func.grad(lambda w: fused_loss()(x, w, bias))(w).isfinite().all())


@pytest.mark.parametrize("tiled", [False, True], ids=["whole", "tiles"])
@pytest.mark.parametrize("target", [7, -1])
def test_nonexistent_class_raises(target, tiled, monkeypatch):
    if tiled:
        use_tiles(monkeypatch)
    with pytest.raises((IndexError, RuntimeError), match="out of"):
        fused_loss(torch.tensor([0, 0, target, 0, 0]))(*INPUTS)


# Each case takes seconds.
@pytest.mark.slow
@pytest.mark.parametrize("tiled", [False, True], ids=["whole", "tiles"])
@pytest.mark.parametrize(
    "batched", [(0, None, None), (None, 0, None), (0, 0, None), (1, 1, 0)], ids=["x", "weight", "both", "all, inside"]
)
def test_vmapped_products_match_a_loop(batched, tiled, monkeypatch):
    """Products by all routes under vmap match a loop."""
    if tiled:
        use_tiles(monkeypatch)
    inputs = [
        each if dim is None else torch.stack([each, each.cos(), 2 * each], dim)
        for each, dim in zip(INPUTS, batched, strict=True)
    ]
    f = fused_loss(smoothing=0.1, reduction="none")

    def products(x, w, bias):
        found = all_derivatives(f, (x, w, bias))
        return torch.cat([each.reshape(-1) for each in found])

    found = torch.func.vmap(products, batched)(*inputs)
    for i in range(3):
        one = [each if dim is None else each.select(dim, i) for each, dim in zip(inputs, batched, strict=True)]
        assert_same([found[i]], [products(*one)])


def test_vmapped_samples_share_one_call(small_tiles, monkeypatch):
    """A batch of inputs with one weight is one call with more samples."""
    calls = []
    run = tiles.tilewise
    monkeypatch.setattr(tiles, "tilewise", lambda *args: calls.append(args[3][0].shape) or run(*args))
    x, w, bias = INPUTS
    torch.func.vmap(lambda x: torch.func.grad(lambda x: fused_loss()(x, w, bias))(x))(torch.stack([x, 2 * x]))
    assert calls == [(2 * SAMPLES, SIZE)] * 2


def test_batched_gradients_without_vmap_rule_match():
    x, w, bias = (each.clone().requires_grad_() for each in INPUTS)
    losses = fused_loss(reduction="none")(x, w, bias)
    (rows,) = torch.autograd.grad(losses, w, torch.eye(SAMPLES, dtype=D), is_grads_batched=True)
    expected = torch.func.jacrev(lambda w: fused_loss(reduction="none")(*(x, w, bias)))(w)
    torch.testing.assert_close(rows, expected)


def test_hvp_matches_dense_hessian(small_tiles):
    phi, point, v = contracted(fused_loss(z_loss=0.1), INPUTS)
    expected = contracted(reference(z_loss=0.1), INPUTS)[0]
    torch.testing.assert_close(hodiff.hvp(phi, point, v), hodiff.hessian(expected)(point) @ v)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tiled", [False, True], ids=["whole", "tiles"])
def test_low_precision_is_computed_in_float32(dtype, tiled, monkeypatch):
    if tiled:
        use_tiles(monkeypatch, 16, 64)
    x, w, bias = (each.to(dtype) for each in draw_each((33, 8), (300, 8), (300,)))
    target = torch.arange(33)
    results = []
    for kind in (dtype, D):
        leaves = [each.to(kind).requires_grad_() for each in (x, w, bias)]
        value = fused_loss(target, smoothing=0.1, reduction="sum")(*leaves)
        results.append((value, *torch.autograd.grad(value, leaves)))
    for got, exact in zip(*results, strict=True):
        assert got.dtype == dtype
        error = (got.detach().double() - exact.detach()).abs().max() / exact.detach().abs().max()
        assert float(error) < torch.finfo(dtype).eps


def test_autocast_lowers_the_factors_and_returns_float32():
    x, w, bias = (each.float().requires_grad_() for each in INPUTS)
    with torch.autocast("cpu", torch.bfloat16):
        value = fused_loss()(x, w, bias)
        expected = F.cross_entropy(F.linear(x, w, bias), TARGET)
    assert value.dtype == expected.dtype == torch.float32
    torch.testing.assert_close(value, expected, rtol=1e-2, atol=0)
    rounded = [each.detach().bfloat16().double() for each in (x, w, bias)]
    torch.testing.assert_close(value.double(), fused_loss()(*rounded), rtol=1e-6, atol=0)
    assert all(each.dtype == torch.float32 for each in torch.autograd.grad(value, (x, w, bias)))


def gradient_step(f, x, w):
    torch.autograd.grad(f(x, w), (x, w))


def reverse_product_step(f, x, w):
    first = torch.autograd.grad(f(x, w), (x, w), create_graph=True)
    torch.autograd.grad(sum(map(_energy, first)), (x, w))


def forward_product_step(f, x, w):
    x, w = x.detach(), w.detach()
    torch.func.jvp(torch.func.grad(f, (0, 1)), (x, w), (x, w))


def forward_inside_step(f, x, w):
    x, w = x.detach(), w.detach()
    torch.func.grad(lambda x, w: torch.func.jvp(f, (x, w), (x, w))[1], (0, 1))(x, w)


def third_step(f, x, w):
    first = torch.autograd.grad(f(x, w), (x, w), create_graph=True)
    second = torch.autograd.grad(sum(map(_energy, first)), (x, w), create_graph=True)
    torch.autograd.grad(sum(map(_energy, second)), (x, w))


def peak_bytes(step, f, samples, classes):
    x, w = (each.requires_grad_() for each in draw_each((samples, 4), (classes, 4), dtype=torch.float32))
    target = torch.arange(samples) % classes
    with LiveMemory() as counted:
        step(lambda x, w: f(x, w, target), x, w)
    return counted.peak


STEPS = [gradient_step, reverse_product_step, forward_product_step, forward_inside_step, third_step]


@pytest.mark.one_in(8)
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_memory_is_proportional_to_the_arguments(step, monkeypatch):
    monkeypatch.setattr(tiles, "WHOLE", 2**14)
    monkeypatch.setattr(tiles, "TILE", {"cpu": 2**14, "cuda": 2**14})
    monkeypatch.setattr(blockwise, "BLOCK", 2**14)

    def plain(x, w, target):
        return F.cross_entropy(x @ w.T, target)

    ours = {size: peak_bytes(step, linear_cross_entropy, size, size) for size in (1024, 2048)}
    logits = 4 * 2048**2
    if step is not third_step:
        assert peak_bytes(step, plain, 2048, 2048) > 2 * logits
    # Apart from the tiles, memory grows with the size of the arguments.
    assert ours[2048] < logits / 4
    assert ours[2048] < 2.1 * ours[1024]


X, W = torch.zeros(2, 3, 4), torch.zeros(5, 4)
T = torch.zeros(2, 3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((X.int(), W, T), {}, "input: expected a floating-point tensor, got int32"),
        ((X, W[0], T), {}, "expected input (..., E) and linear_weight (V, E), got input (2, 3, 4), linear_weight (4,)"),
        ((X, W[:, :3], T), {}, "got input (2, 3, 4), linear_weight (5, 3)"),
        ((X, W[:0], T), {}, "linear_weight: expected at least one class, got (0, 4)"),
        ((X, W.double(), T), {}, "of one dtype, got float32, float64; Tensor.to converts"),
        ((X, W.to("meta"), T), {}, "of one device, got input on cpu, linear_weight on meta, target on cpu; Tensor.to"),
        ((X, W, T.to("meta")), {}, "linear_weight on cpu, target on meta; Tensor.to moves them"),
        ((X, W, T), {"linear_bias": torch.zeros(5, device="meta")}, "linear_bias on meta; Tensor.to moves them"),
        ((X, W, T), {"weight": torch.ones(5, device="meta")}, "weight on meta; Tensor.to moves them"),
        ((X.to_sparse(), W, T), {}, "input: expected a dense tensor, got (2, 3, 4) float32 sparse_coo"),
        ((X, W.to(torch.float8_e4m3fn), T), {}, "linear_weight: expected a floating-point tensor of 16 bits or more"),
        ((X, W, T[0]), {}, "target: expected the shape (2, 3) of input without its last dimension, got (3,)"),
        ((X, W, T.int()), {}, "target: expected int64 class indices, got int32; target.long() converts them"),
        ((X, W, T.float()), {}, "got float32; cross_entropy takes probabilities"),
        ((X, W, 3), {}, "target: expected a tensor, got int"),
        ((X, W, T), {"linear_bias": torch.zeros(4)}, "linear_bias: expected one number for each class, shape (5,)"),
        ((X, W, T), {"weight": torch.zeros(5, 1)}, "weight: expected one number for each class, shape (5,)"),
        ((X, W, T), {"weight": torch.ones(5, requires_grad=True)}, "weight: expected a constant"),
        ((X, W, T), {"reduction": "max"}, "reduction: expected one of 'none', 'mean', 'sum', got 'max'"),
        ((X, W, T), {"label_smoothing": 1.5}, "label_smoothing: expected a number from 0 to 1, got 1.5"),
        ((X, W, T), {"z_loss": -1.0}, "z_loss: expected a nonnegative finite number, got -1.0"),
        ((X, W, T), {"softcap": 0.0}, "softcap: expected a positive finite number or None, got 0.0"),
        ((X, W, T), {"ignore_index": None}, "ignore_index: expected an int, got None"),
    ],
)
def test_rejects_bad_arguments(arguments, options, message):
    with pytest.raises(InputError, match=re.escape("linear_cross_entropy: ") + ".*" + re.escape(message)):
        linear_cross_entropy(*arguments, **options)


def test_meta_tensors_are_accepted():
    x, w, target = (each.to("meta") for each in (X, W, T))
    for reduction, shape in (("mean", ()), ("none", (2, 3))):
        y = linear_cross_entropy(x, w, target, reduction=reduction)
        assert (y.device.type, y.shape) == ("meta", shape)


def test_differentiated_class_weights_are_rejected():
    x, w, _ = INPUTS
    with pytest.raises(InputError, match="weight: expected a constant"):
        torch.func.grad(lambda weight: linear_cross_entropy(x, w, TARGET, weight=weight))(WEIGHT)


def test_class_weights_computed_from_constants_are_accepted_in_forward_mode():
    x, w, bias = INPUTS
    for make in (lambda: (WEIGHT / WEIGHT.mean()).detach(), lambda: 2 * WEIGHT, lambda: WEIGHT.float().to(D)):
        ours = torch.func.grad(lambda x, make=make: linear_cross_entropy(x, w, TARGET, weight=make(), reduction="sum"))
        theirs = torch.func.grad(
            lambda x, make=make: linear_reference(x, w, TARGET, torch.zeros_like(bias), make())[0].sum()
        )
        found, expected = (torch.func.jvp(f, (x,), (x,))[1] for f in (ours, theirs))
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("levels", [1, 2])
def test_class_weights_with_a_tangent_are_rejected(levels):
    x, w, _ = INPUTS

    def f(weight):
        one = lambda x: linear_cross_entropy(x, w, TARGET, weight=weight)  # noqa: E731
        return one(x) if levels == 1 else torch.func.jvp(torch.func.grad(one), (x,), (x,))[1]

    with pytest.raises(InputError, match="weight: expected a constant"):
        torch.func.jvp(f, (WEIGHT,), (WEIGHT,))
