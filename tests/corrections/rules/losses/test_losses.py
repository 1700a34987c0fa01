"""Losses: torch's values and errors, correct derivatives by every route, closed forms."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from corrections.against_torch import same_error, same_value
from corrections.contract import Contract
from drawing import draw

import hodiff

D = torch.float64
corrected = hodiff.corrected()

Y = torch.tensor([0, 2])
LABELS = torch.tensor([[2, 0, -1], [1, -1, 0]])
TARGET = draw(2, 3, seed=1)
SIGNS = draw(2, 3, seed=1).sign()
WEIGHT = torch.tensor([0.5, 2.0, 1.5], dtype=D)
CTC = torch.tensor([[1, 2], [1, 1]])


def ctc(log_probs, targets=CTC, steps=(4, 3), lengths=(2, 1), function=F.ctc_loss, **options):
    return function(log_probs.log_softmax(-1), targets, steps, lengths, **options)


CALLS = {
    "huber": (lambda x, t: F.huber_loss(x, t, delta=0.7), (draw(2, 3), draw(2, 3, seed=1))),
    "huber, weighted": (
        lambda x, t, w: F.huber_loss(x, t, "sum", 0.7, w),
        (draw(2), draw(2, seed=1), draw(2, seed=2) ** 2),
    ),
    "l1, weighted": (lambda x, w: F.l1_loss(x**2, TARGET, weight=w**2), (draw(2, 3), draw(2, 3, seed=2))),
    "mse, weighted": (
        lambda x, t, w: F.mse_loss(x, t, reduction="sum", weight=w**2),
        (draw(2), draw(2, seed=1), draw(2, seed=2)),
    ),
    "mse, constant target": (lambda x: F.mse_loss(x**2, TARGET), (draw(2, 3),)),
    "mse": (lambda x, t: F.mse_loss(x, t, reduction="none").sin(), (draw(2, 3), draw(2, 3, seed=1))),
    "logits, constant target": (
        lambda x: F.binary_cross_entropy_with_logits(x, TARGET.sigmoid(), TARGET[0] ** 2, pos_weight=WEIGHT),
        (draw(2, 3),),
    ),
    "logits": (
        lambda x, t: F.binary_cross_entropy_with_logits(x, t, reduction="sum", pos_weight=WEIGHT),
        (draw(2, 3), draw(2, 3, seed=1)),
    ),
    "soft_margin": (lambda x: F.soft_margin_loss(x, SIGNS), (draw(2, 3),)),
    "soft_margin, none": (lambda x: F.soft_margin_loss(x, SIGNS, reduction="none"), (draw(2, 3),)),
    "poisson": (
        lambda x, t: F.poisson_nll_loss(x, t, full=True),
        (draw(4), torch.tensor([0.2, 0.9, 1.3, 4.0], dtype=D)),
    ),
    "poisson, of rates": (
        lambda x, t: F.poisson_nll_loss(x**2, t**2, log_input=False, full=True, eps=0.1, reduction="none"),
        (draw(4), draw(4, seed=1)),
    ),
    "cosine": (
        lambda a, b: F.cosine_embedding_loss(a, b, torch.tensor([1, -1, 0]), margin=-0.9, reduction="none"),
        (draw(3, 2), draw(3, 2, seed=1)),
    ),
    "cosine, one": (lambda a, b: F.cosine_embedding_loss(a, b, torch.tensor(1)), (draw(3), draw(3, seed=1))),
    "triplet": (
        lambda a, p: F.triplet_margin_loss(a, p, a.flip(0) * 1.2, margin=2.5),
        (draw(2, 3), draw(2, 3, seed=1)),
    ),
    "triplet, swapped": (
        lambda a, p: F.triplet_margin_loss(a, p, a.flip(0) * 1.2, margin=2.5, p=3, swap=True, reduction="none"),
        (draw(2, 3), draw(2, 3, seed=1)),
    ),
    "multi_margin": (lambda x: F.multi_margin_loss(x.sin() * x, Y, weight=WEIGHT), (draw(2, 3),)),
    "multi_margin, squared": (lambda x: F.multi_margin_loss(x, Y, p=2, margin=0.8, reduction="none"), (draw(2, 3),)),
    "multi_margin, one": (lambda x: F.multi_margin_loss(x, torch.tensor(1), p=2), (draw(3),)),
    "multilabel_margin": (lambda x: F.multilabel_margin_loss(x**3 / 4, LABELS), (draw(2, 3),)),
    "multilabel_margin, none": (
        lambda x: F.multilabel_margin_loss(x**3, LABELS, reduction="none").sin(),
        (draw(2, 3),),
    ),
    "ctc": (ctc, (draw(4, 2, 3),)),
    "ctc, concatenated": (lambda x: ctc(x, torch.tensor([1, 2, 2]), reduction="none"), (draw(4, 2, 3),)),
    "ctc, tensors": (
        lambda x: ctc(x, CTC, torch.tensor([4, 4]), torch.tensor([2, 0]), reduction="sum", zero_infinity=True),
        (draw(4, 2, 3),),
    ),
    "ctc, one": (lambda x: ctc(x, torch.tensor([0, 1]), (3,), (2,), blank=2), (draw(3, 3),)),
    "torch.ctc": (lambda x: ctc(x, CTC, function=torch.ctc_loss, reduction=2), (draw(4, 2, 3),)),
    "ctc, without softmax": (lambda x: F.ctc_loss(x, CTC, (4, 3), (2, 1)), (draw(4, 2, 3),)),
}
if hasattr(F, "linear_cross_entropy"):
    OPTIONS = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=2)
    for reduction in ("mean", "none"):
        CALLS[f"linear_cross_entropy, {reduction}"] = (
            lambda x, w, r=reduction: F.linear_cross_entropy(
                x, w, torch.tensor([0, 2, 1]), reduction=r, options=OPTIONS
            ),
            (draw(3, 2), draw(3, 2, seed=1)),
        )
    CALLS["linear_cross_entropy, bias and weights"] = (
        lambda x, w, b: F.linear_cross_entropy(
            x, w, torch.tensor([0, 2, 1]), linear_bias=b, weight=WEIGHT, ignore_index=2, options=OPTIONS
        ),
        (draw(3, 2), draw(3, 2, seed=1), draw(3, seed=2)),
    )
    CALLS["linear_cross_entropy, by weights"] = (
        lambda x, w, each: F.linear_cross_entropy(
            x, w, torch.tensor([0, 2, 1]), weight=each, ignore_index=2, options=OPTIONS
        ),
        (draw(3, 2), draw(3, 2, seed=1), WEIGHT),
    )
    CALLS["linear_cross_entropy, one"] = (
        lambda x, w: F.linear_cross_entropy(x, w, torch.tensor(2), reduction="sum", options=OPTIONS),
        (draw(2), draw(3, 2, seed=1)),
    )


# These contain constants in float64.
WIDE = tuple(name for name in CALLS if name.startswith(("soft_margin", "multi_margin", "mse, constant", "l1")))
# Torch refuses weights that require a gradient.
OF_TORCH = [name for name in CALLS if name != "linear_cross_entropy, by weights"]


@pytest.mark.parametrize(
    ("name", "dtype"), [(name, dtype) for name in OF_TORCH for dtype in ((D,) if name in WIDE else (D, torch.float32))]
)
def test_values_and_gradients_match_torch(name, dtype):
    function, inputs = CALLS[name]
    leaves = [each.to(dtype).requires_grad_() for each in inputs]

    def results():
        value = function(*leaves)
        if name == "ctc, without softmax":  # torch's gradient is by logits
            return (value,)
        return value, *torch.autograd.grad(value.sum(), leaves)

    same_value(results)


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="new in torch 2.13")
def test_linear_cross_entropy_with_options_uses_the_tiled_function(monkeypatch):
    calls = []
    ours = hodiff.functions.linear_cross_entropy
    monkeypatch.setattr(hodiff.functions, "linear_cross_entropy", lambda *a, **k: calls.append(a) or ours(*a, **k))
    x, w, target = draw(3, 2).requires_grad_(), draw(3, 2, seed=1), torch.tensor([0, 2, 1])
    taken = [
        {"options": OPTIONS},
        {"options": OPTIONS, "reduction": "none"},
        {"options": OPTIONS, "weight": WEIGHT, "linear_bias": draw(3, seed=2)},
    ]
    # Torch refuses weights that require a gradient.
    left = [{}, {"options": OPTIONS, "weight": WEIGHT.clone().requires_grad_()}]
    for k, options in enumerate([*taken, *left]):
        constants = {name: each.detach() if torch.is_tensor(each) else each for name, each in options.items()}
        expected = F.linear_cross_entropy(x, w, target, **constants)
        with corrected:
            torch.testing.assert_close(F.linear_cross_entropy(x, w, target, **options), expected)
        assert len(calls) == min(k + 1, len(taken))
    # Torch's kernel supports neither, and raises.
    for options in ({"label_smoothing": 0.1}, {"linear_weight": draw(3, 2, 2), "target": torch.zeros(3, 2).long()}):
        arguments = {"input": x, "linear_weight": w, "target": target, **options}
        expected = F.linear_cross_entropy(**arguments)
        with corrected:
            torch.testing.assert_close(F.linear_cross_entropy(**arguments, options=OPTIONS), expected)
    assert len(calls) == len(taken)
    with corrected, pytest.raises(RuntimeError, match="last dimensions"):
        F.linear_cross_entropy(x, w[:, :1], target, options=OPTIONS)


def test_huber_loss_matches_closed_form():
    x = torch.tensor([0.3, -2.0, 1.0], dtype=D, requires_grad=True)
    with corrected:
        value = F.huber_loss(x, torch.zeros(3, dtype=D), "none", 1.0)
        (first,) = torch.autograd.grad(value.sum(), x, create_graph=True)
    torch.testing.assert_close(value.detach(), torch.tensor([0.045, 1.5, 0.5], dtype=D))
    torch.testing.assert_close(first.detach(), torch.tensor([0.3, -1.0, 1.0], dtype=D))
    assert torch.autograd.grad(first[:2].sum(), x)[0].tolist() == [1.0, 0.0, 0.0]


SOME = torch.tensor([1, 2, -100, 0])
PROBABILITIES = draw(4, 3, seed=3).softmax(1)
WEIGHTED = {
    "indices": lambda x, w: F.cross_entropy(x, SOME, weight=w * w),
    "smoothed": lambda x, w: F.cross_entropy(x, SOME, w * w, label_smoothing=0.1),
    "none": lambda x, w: F.cross_entropy(x, SOME, w * w, reduction="none", label_smoothing=0.1),
    "probabilities": lambda x, w: F.cross_entropy(x, PROBABILITIES, w * w, label_smoothing=0.1),
    "images": lambda x, w: F.cross_entropy(x.reshape(2, 3, 2), SOME.reshape(2, 2), w * w, reduction="sum"),
    "one": lambda x, w: F.cross_entropy(x[0], SOME[0], w * w),
    "nll": lambda x, w: F.nll_loss(x, SOME, w * w),
    "binary": lambda x, w: F.binary_cross_entropy(x.sigmoid(), PROBABILITIES, w * w),
}


@pytest.mark.one_in(9)
@pytest.mark.parametrize("name", WEIGHTED)
def test_derivatives_by_class_weights_match_differences(name):
    """Torch returns zeros in forward mode, and raises in reverse mode; hodiff is correct."""
    function, inputs = WEIGHTED[name], (draw(4, 3), torch.tensor([0.5, 1.2, 2.0], dtype=D))
    hodiff.assert_differentiable(corrected(function), inputs, vmap=False, scipy=False)
    moving = [each.clone().requires_grad_() for each in inputs]
    with corrected:
        torch.testing.assert_close(function(*moving).detach(), function(*inputs))


@pytest.mark.parametrize("deprecated", [{"size_average": False}, {"reduce": False}, (False,), (None, -100, False)])
@pytest.mark.filterwarnings("ignore:size_average and reduce args:UserWarning")
def test_deprecated_reductions_match_torch_with_constant_weights(deprecated):
    x, w = draw(4, 3), torch.tensor([0.5, 1.2, 2.0], dtype=D)
    args, kwargs = ((), deprecated) if isinstance(deprecated, dict) else (deprecated, {})
    expected = F.cross_entropy(x, SOME, w, *args, **kwargs)
    with corrected, torch.autograd.forward_ad.dual_level():
        moving = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        got = F.cross_entropy(moving, SOME, w, *args, **kwargs)
        torch.testing.assert_close(torch.autograd.forward_ad.unpack_dual(got).primal, expected)
        with pytest.raises(hodiff.RouteError, match="size_average and reduce are deprecated"):
            F.cross_entropy(x, SOME, torch.autograd.forward_ad.make_dual(w, torch.ones_like(w)), *args, **kwargs)


def test_weighted_mean_derivative_by_a_weight_matches_closed_form():
    """The mean of two examples is (w a + v b) / (w + v), whose derivative by w is v (a - b) / (w + v)²."""
    x, w = draw(2, 2), torch.tensor([0.5, 2.0], dtype=D)
    a, b = (-x.log_softmax(1)).diagonal()
    got = hodiff.jacobian(lambda w: F.cross_entropy(x, torch.tensor([0, 1]), w), mode="forward")(w)
    torch.testing.assert_close(got[0], w[1] * (a - b) / w.sum() ** 2)


@pytest.mark.parametrize("route", hodiff.ROUTES)
def test_poisson_nll_full_with_counts_below_one_matches_closed_form(route):
    """Counts below 1 add no term of their own: the loss is exp(x) - t x, with a mixed derivative of -1."""
    point = torch.tensor([0.5, -7.0], dtype=D)
    H = hodiff.hessian_matrix(lambda p: F.poisson_nll_loss(p[:1], p[1:], full=True), point, route=route)
    torch.testing.assert_close(H, torch.tensor([[math.exp(0.5), -1.0], [-1.0, 0.0]], dtype=D))


def test_cosine_loss_third_derivative_matches_closed_form():
    """The loss along a unit circle is cos(a), and its third derivative sin(a) by all nestings of modes."""
    angle, one = torch.tensor(0.7, dtype=D), torch.ones((), dtype=D)

    def loss(a):
        circle = torch.stack([a.cos(), a.sin()])[None]
        return F.cosine_embedding_loss(circle, torch.tensor([[1.0, 0.0]], dtype=D), torch.tensor([-1]), margin=-1.0)

    def forward(f):
        return lambda a: torch.func.jvp(f, (a,), (one,))[1]

    for modes in itertools.product((forward, torch.func.grad), repeat=3):
        derivative = corrected(loss)
        for mode in modes:
            derivative = mode(derivative)
        torch.testing.assert_close(derivative(angle), angle.sin())


def test_margin_losses_have_zero_derivative_at_the_margin():
    """The derivative is zero exactly at the margin, as in torch."""
    x = torch.tensor([1.0, 0.0, 0.5], dtype=D, requires_grad=True)
    calls = (
        lambda: F.multi_margin_loss(x, torch.tensor(0)),
        lambda: F.multilabel_margin_loss(x, torch.tensor([0, -1, -1])),
    )
    for call in calls:
        (expected,) = torch.autograd.grad(call(), x)
        with corrected:
            (got,) = torch.autograd.grad(call(), x)
        torch.testing.assert_close(got, expected)


def by_enumeration(log_probs, target, blank):
    """-log of the probability of all paths that collapse to the target: Graves et al. (2006), eq. 3."""
    total = 0
    for path in itertools.product(range(log_probs.shape[1]), repeat=log_probs.shape[0]):
        if [label for label, _ in itertools.groupby(path) if label != blank] == target:
            total = total + torch.exp(sum(log_probs[step, label] for step, label in enumerate(path)))
    return -torch.log(total)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("target", [[], [1], [1, 2], [1, 1], [2, 1, 2]])
@pytest.mark.parametrize("route", hodiff.ROUTES)
def test_ctc_loss_matches_the_sum_over_alignments(target, route):
    x, v = draw(4, 3), draw(4, 3, seed=1)

    def loss(x):
        targets = torch.tensor(target, dtype=torch.long)
        return F.ctc_loss(x, targets, (4,), (len(target),), reduction="sum")

    def truth(x):
        return by_enumeration(x, target, 0)

    with corrected:
        torch.testing.assert_close(loss(x), truth(x))
        torch.testing.assert_close(torch.func.grad(loss)(x), torch.func.grad(truth)(x))
    torch.testing.assert_close(hodiff.hvp(loss, x, v, route=route), hodiff.hvp(truth, x, v))


def test_ctc_loss_of_impossible_alignment_is_infinite_with_nan_gradient():
    x = draw(2, 2, 3)

    def loss(x, **options):
        return ctc(x, CTC, (2, 2), (2, 2), reduction="none", **options)

    with corrected:
        assert loss(x)[1] == math.inf
        gradient = torch.func.grad(lambda x: loss(x)[1])(x)
        assert gradient[:, 1].isnan().all()  # as in torch
        assert torch.func.grad(lambda x: loss(x)[0])(x)[:, 0].isfinite().all()
        finite = torch.func.hessian(lambda x: loss(x, zero_infinity=True).sum())(x)
    assert finite.isfinite().all()
    assert finite[:, 0].any()
    assert not finite[:, 1].any()


def test_ctc_loss_with_zero_probability_labels_has_finite_derivatives():
    x = draw(3, 1, 3).log_softmax(-1)
    x[1, 0, 2] = -math.inf
    with corrected:
        second = torch.func.hessian(lambda x: F.ctc_loss(x, torch.tensor([[1]]), (3,), (1,)))(x)
    assert second.isfinite().all()


WRONG = {
    "ctc lengths that are no integers": lambda x: F.ctc_loss(
        x[:, None], torch.tensor([[1]]), torch.tensor([2.0]), torch.tensor([1.0])
    ),
    "ctc lengths of a list": lambda x: F.ctc_loss(x[:, None], torch.tensor([[1]]), [2.5], [1.5]),
    "huber, delta": lambda x: F.huber_loss(x, x, delta=-1.0),
    "huber, reduction": lambda x: F.huber_loss(x, x, "median"),
    "huber, weight": lambda x: F.huber_loss(x, x, weight=x[:1]),
    "soft_margin, reduction": lambda x: F.soft_margin_loss(x, x, reduction="median"),
    "soft_margin, shapes": lambda x: F.soft_margin_loss(x, x[:, :2]),
    "multi_margin, class": lambda x: F.multi_margin_loss(x, torch.tensor([0, 3])),
    "multi_margin, targets": lambda x: F.multi_margin_loss(x, torch.tensor([0])),
    "multi_margin, p": lambda x: F.multi_margin_loss(x, Y, p=3),
    "multi_margin, weight": lambda x: F.multi_margin_loss(x, Y, weight=WEIGHT[:2]),
    "multilabel_margin, class": lambda x: F.multilabel_margin_loss(x, LABELS + 2),
    "multilabel_margin, shape": lambda x: F.multilabel_margin_loss(x, LABELS[:1]),
    "ctc, steps": lambda x: F.ctc_loss(x[:, None], torch.tensor([[1]]), (5,), (1,)),
    "ctc, lengths": lambda x: F.ctc_loss(x[:, None], torch.tensor([[1]]), (2, 2), (1,)),
    "ctc, long targets": lambda x: F.ctc_loss(x[:, None], torch.tensor([[1]]), (2,), (2,)),
    "ctc, blank": lambda x: F.ctc_loss(x[:, None], torch.tensor([[1]]), (2,), (1,), blank=3),
    "ctc, reduction": lambda x: F.ctc_loss(x[:, None], torch.tensor([[1]]), (2,), (1,), reduction="median"),
}


def test_broadcasting_loss_warns_as_torch_does():
    x, t = draw(2, 3), draw(3, seed=1)
    with pytest.warns(UserWarning, match="different to the input size"):
        expected = F.huber_loss(x, t)
    with corrected, pytest.warns(UserWarning, match="different to the input size"):
        torch.testing.assert_close(F.huber_loss(x, t), expected)


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_compiled_l1_loss_keeps_its_weight(reduction):
    """Torch alone loses the weight, as its graph calls the function in a mode."""
    x = draw(2, 3)

    def loss(x):
        return F.l1_loss(x, TARGET, reduction=reduction, weight=TARGET**2).sum()

    compiled = torch.compile(corrected(torch.func.grad(loss)), backend="aot_eager")
    torch.testing.assert_close(compiled(x), torch.func.grad(loss)(x))


INTEGERS = torch.tensor([1, 2, 3])
# Losses with an integer or boolean first argument, or of shapes that broadcast, and the differences by hand
DIFFERENCES = {
    "smooth_l1 of integers": (lambda x: F.smooth_l1_loss(INTEGERS, x, beta=9.0) * 18, lambda x: INTEGERS - x),
    "smooth_l1 of booleans": (
        lambda x: F.smooth_l1_loss(INTEGERS > 1, x, beta=9.0) * 18,
        lambda x: (INTEGERS > 1) * 1 - x,
    ),
    "mse of integers": (lambda x: F.mse_loss(INTEGERS, x), lambda x: INTEGERS - x),
    "mse that broadcasts": (lambda x: F.mse_loss(TARGET, x), lambda x: TARGET - x),
    "mse of one that broadcasts": (lambda x: F.mse_loss(TARGET, x[1:2] * x[0]), lambda x: TARGET - x[1] * x[0]),
}


@pytest.mark.filterwarnings("ignore:Using a target size:UserWarning")
@pytest.mark.parametrize("name", DIFFERENCES)
def test_squares_of_other_dtypes_and_shapes_match_formula(name):
    loss, difference = DIFFERENCES[name]
    x, v = draw(3), draw(3, seed=1)
    expected = hodiff.hvp(lambda x: difference(x).square().mean(), x, v)
    for route in hodiff.ROUTES:
        torch.testing.assert_close(hodiff.hvp(loss, x, v, route=route), expected)


@pytest.mark.parametrize("route", hodiff.ROUTES)
@pytest.mark.parametrize("full", [False, True])
def test_gaussian_nll_below_eps_matches_closed_form(route, full):
    """The loss is (log v + (x - t)² / v) / 2 for a variance v that has the value eps and moves."""
    x, eps = torch.tensor([[0.3, 0.01], [1.2, 0.5]], dtype=D), 0.1

    def loss(x):
        return F.gaussian_nll_loss(x[:, 0], torch.ones(2, dtype=D), x[:, 1], full, eps, "sum")

    mean, var = x[:, 0], x[:, 1].clamp(min=eps)
    by_mean, mixed = 1 / var, -(mean - 1) / var**2
    by_var = -0.5 / var**2 + (mean - 1) ** 2 / var**3
    expected = torch.stack([torch.stack([by_mean, mixed], -1), torch.stack([mixed, by_var], -1)], 1)
    torch.testing.assert_close(hodiff.hessian_matrix(loss, x, route=route), torch.block_diag(*expected))
    torch.testing.assert_close(hodiff.laplacian(loss)(x), (by_mean + by_var).sum())
    same_value(lambda: loss(x.requires_grad_()))


def test_gaussian_nll_maps_over_points_and_compiles():
    """torch's own function reads whether a variance is negative, which `vmap` refuses."""

    def product(p):
        return hodiff.hvp(lambda p: F.gaussian_nll_loss(p[:2], TARGET[0, :2], p[2:], eps=0.9), p, torch.ones_like(p))

    points = draw(3, 4) ** 2 + 0.5
    expected = torch.stack([product(each) for each in points])
    torch.testing.assert_close(torch.vmap(product)(points), expected)
    torch.testing.assert_close(torch.compile(product, backend="eager")(points[0]), expected[0])


@pytest.mark.parametrize(
    "var", [torch.tensor([0.2, -0.1], dtype=D), torch.ones(3, dtype=D), torch.ones(2, 2, 1, dtype=D)]
)
def test_errors_of_gaussian_nll_match_torch(var):
    same_error(lambda v: F.gaussian_nll_loss(draw(2, 2), draw(2, 2), v), var.requires_grad_())


def test_gaussian_nll_of_one_variance_for_each_row_matches_torch():
    for shape in ((2,), (2, 1), (2, 3)):
        var = (draw(*shape) ** 2 + 1).requires_grad_()
        for reduction in ("mean", "none"):
            same_value(lambda v=var, r=reduction: F.gaussian_nll_loss(draw(2, 3), TARGET, v, reduction=r))


@pytest.mark.parametrize("order", [1, 2])
def test_binary_cross_entropy_at_probabilities_0_and_1(order):
    """Infinite derivatives of the logarithm are bounded by 1e12, as in torch; all other derivatives are exact."""
    p, t = torch.tensor([0.0, 1.0, 0.0, 1.0], dtype=D), torch.tensor([0.0, 0.0, 1.0, 1.0], dtype=D)
    expected = torch.tensor([[1.0, 1e12, -1e12, -1.0], [1.0, 1e24, 1e24, 1.0]], dtype=D)

    def loss(p):
        return F.binary_cross_entropy(p, t, reduction="sum")

    with corrected:
        assert torch.equal(F.binary_cross_entropy(p.requires_grad_(), t), torch.tensor(50.0, dtype=D))
    found = hodiff.directional_derivatives(loss, p.detach(), torch.ones(4, dtype=D), order=2)
    torch.testing.assert_close(found[order], expected[order - 1].sum())
    by_reverse = torch.func.grad(corrected(loss))
    if order == 2:
        by_reverse = torch.func.grad(lambda p: torch.func.grad(corrected(loss))(p).sum())
    torch.testing.assert_close(by_reverse(p.detach()), expected[order - 1])


@pytest.mark.parametrize("weight", [None, torch.tensor([0.5, 1.2, 2.0], dtype=D)], ids=["plain", "weighted"])
def test_saturated_cross_entropy_hessian_matches_closed_form(weight):
    """The Hessian of a sample is -p_i p_j off the diagonal, and its rows sum to zero."""
    x, target = torch.tensor([[40.0, 0.0, 0.0], [0.0, 1.0, 30.0]], dtype=D), torch.tensor([0, 1])
    p = x.softmax(1)
    expected = -p[:, :, None] * p[:, None, :] * (1 - torch.eye(3, dtype=D))
    expected = expected - torch.diag_embed(expected.sum(2))
    got = torch.func.vmap(corrected(torch.func.hessian(lambda x, y: F.cross_entropy(x, y, weight))))(x, target)
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-30)


class TestContract(Contract):
    cases, order = CALLS, 3
    quick, one_in = list(CALLS)[::2], 15
    # Dynamo hides torch's linear_cross_entropy from modes; compiled, its second derivative raises.
    not_compiled = tuple(each for each in CALLS if each.startswith("linear_cross_entropy"))
    errors, error_inputs = WRONG, (draw(2, 3),)
