"""Results of `check` for ordinary functions, at smooth points, kinks and jumps."""

import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from custom_functions import Square, custom, in_place_multiple
from zoo.wrong.surroundings import EmptyInBackward

import hodiff
from hodiff import InputError, straight_through
from hodiff.checks import check
from hodiff.checks.pipelines import check_function as by_routes
from hodiff.functions import nestable_jvp

GENERATOR = torch.Generator().manual_seed(7)


def normal(*shape, dtype=torch.float64):
    return torch.randn(shape, generator=GENERATOR, dtype=torch.float64).to(dtype)


@pytest.mark.slow
def test_functional_call_of_a_module_passes():
    module = torch.nn.Linear(3, 2).double()
    parameters = {name: p.detach() for name, p in module.named_parameters()}
    report = check(
        lambda p, x: F.softplus(torch.func.functional_call(module, p, (x,))), (parameters, normal(4, 3)), order=3
    )
    assert report.ok, str(report)
    assert "float64[2, 3], float64[2], float64[4, 3]" in report.title


RIGHT = {
    "sin": (torch.sin, (normal(3),)),
    "quadratic form": (lambda A, x: x @ A @ x, (normal(3, 3), normal(3))),
    "logsumexp": (lambda x: torch.logsumexp(x, -1), (normal(4, 5, dtype=torch.float32),)),
    "softmax in bfloat16": (lambda x: x.softmax(-1), (normal(3, 4, dtype=torch.bfloat16),)),
    "zero but for rounding": (lambda x: x.softmax(-1).sum(-1), (normal(3, 4, dtype=torch.float32),)),
    "linear": (lambda x: 3 * x, (normal(3),)),
    "constant at second order, far from one": (lambda x: 1e6 + 1e-3 * x**2, (normal(2),)),
    "steep": (lambda x: torch.exp(1e3 * x), (1e-3 * normal(3),)),
    "near the edge": (torch.log, (1e-2 * normal(3).abs() + 1e-3,)),
    "raises beyond the edge": (lambda x: torch.linalg.cholesky(x @ x.T), (torch.eye(2).double(),)),
    "scalars": (lambda x: x**3, (torch.tensor(0.7),)),
    "complex output": (lambda x: torch.fft.fft(x) ** 2, (normal(4),)),
    "several outputs": (lambda x: {"a": x.sin(), "n": x.argmax(), "none": None}, (normal(3),)),
    "index and constant": (lambda x, i, p: x[i] ** p, (normal(5), torch.tensor([0, 2]), 3)),
    "mixed dtypes": (lambda x, y: x.double() * y**2, (normal(3, dtype=torch.float32), normal(3))),
}


@pytest.mark.one_in(15)
@pytest.mark.parametrize("name", RIGHT)
def test_right_function_passes(name):
    f, inputs = RIGHT[name]
    report = check(f, inputs)
    assert report.ok, str(report)


@pytest.mark.slow
def test_forward_mode_inside_a_function_passes_but_for_gradcheck():
    """torch.func's forward mode nests inside a function; gradcheck's torch.autograd.forward_ad does not."""

    def curvature(x):
        return torch.func.jvp(torch.func.grad(lambda y: (y**4).sum()), (x,), (torch.ones_like(x),))[1]

    report = check(curvature, (normal(3),))
    assert report.ok, str(report)
    skipped = [entry for entry in report.entries if entry.status == "skipped" and "forward_ad" in entry.detail]
    assert {entry.quantity for entry in skipped} == {"forward", "forward-over-reverse"}


def test_torch_operator_with_silently_wrong_derivative_is_found():
    report = check(lambda x: F.layer_norm(x, (3,)), normal(3, 3), correct=False)
    wrong = {entry.route for entry in report.entries if entry.status in {"zero", "wrong"}}
    assert wrong == {"reverse-over-forward", "forward-over-forward"}
    assert "by torch alone: " in str(report).split("\n")[0]


@pytest.mark.slow
def test_functions_that_torch_alone_has_wrong_are_a_warning():
    def f(x):
        return F.layer_norm(x, (3,)) * torch.linalg.det(x)

    report = check(f, normal(3, 3))
    assert "within corrected(): ok" in str(report).split("\n")[0]
    (finding,) = report.warnings
    assert (finding.code, finding.kind) == ("HD410", "wrong")
    assert {"reverse-over-forward", "forward-over-forward"} == set(finding.route.split(", "))
    assert any("torch.nn.functional.layer_norm" in each for each in finding.evidence)
    if torch.__version__ < "2.15":
        assert any("torch.linalg.det" in each for each in finding.evidence)
    assert finding.location.startswith("test_check.py:")


@pytest.mark.slow
def test_unwritten_memory_is_not_compared_with_torch_alone(monkeypatch):
    """Uninitialized memory differs from call to call, so torch alone may fail although corrections did not."""
    monkeypatch.setattr(by_routes, "torch_alone", lambda *_: pytest.fail("numbers that mean nothing were compared"))
    assert "HD308" in check(EmptyInBackward, normal(3)).codes


@pytest.mark.one_in(2)
@pytest.mark.parametrize("f", [torch.sin, lambda x: x.clamp(-2, 2).relu(), lambda x: x.sum(0).pow(2)])
def test_functions_that_torch_has_right_have_no_finding(f):
    assert check(f, normal(3)).codes == ()


KINKS = [
    (torch.abs, [0.0, 1.0], 1, "non-smooth"),
    (torch.relu, [0.0, 1.0], 1, "non-smooth"),
    (lambda x: x.relu() ** 2, [0.0, 1.0], 2, "non-smooth"),
    (torch.sqrt, [0.0, 1.0], 1, "non-finite"),
    (lambda x: x * x.abs().sqrt(), [0.0, 1.0], 1, "non-finite"),
]


@pytest.mark.one_in(5)
@pytest.mark.parametrize(("f", "x", "order", "kind"), KINKS)
def test_kinks_and_singular_points_are_found(f, x, order, kind):
    report = check(f, torch.tensor(x, dtype=torch.float64))
    assert (order, kind) in {(finding.order, finding.kind) for finding in report.findings}, str(report)
    rows = [entry for entry in report.entries if entry.order >= order and entry.quantity == "vs differences"]
    assert rows
    assert "ok" not in {entry.status for entry in rows}


def test_nan_never_counts_as_agreement():
    report = check(lambda x: x * math.nan, normal(2))
    rows = [entry for entry in report.entries if entry.quantity == "vs differences"]
    assert {entry.status for entry in rows} <= {"non-finite", "skipped"}
    assert not report.ok


def test_cancellation_in_float32_is_imprecise():
    """1 - cos(x) cancels in float32 near zero, and 1/(...) amplifies the error."""
    report = check(lambda x: 1 / (1 - torch.cos(x)), torch.tensor([2e-3]))
    assert {finding.kind for finding in report.findings} == {"imprecise"}, str(report)


@pytest.mark.slow
def test_float32_weights_of_a_function_are_a_finding():
    linear = torch.nn.Linear(3, 2)
    report = check(lambda x: linear(x), normal(3, dtype=torch.float32))
    assert report.codes == ("HD306",), str(report)
    assert report.findings[0].kind == "float64"
    assert "module.double()" in report.findings[0].remedy


def test_float32_module_is_no_finding():
    linear = torch.nn.Linear(3, 2)
    report = check(linear, normal(3, dtype=torch.float32))
    assert (report.ok, report.codes) == (True, ()), str(report)
    assert "8 numbers in parameters and 3 in inputs" in report.notes[0]
    assert linear.weight.dtype == torch.float32


def test_custom_op_without_jvp_is_a_finding():
    @torch.library.custom_op("hodiff_test::cube", mutates_args=())
    def cube(x: torch.Tensor) -> torch.Tensor:
        return x**3

    report = check(cube, normal(2), vmap=False)
    assert report.codes == ("HD406",), str(report)
    assert {entry.status for entry in report.entries if entry.route == "forward"} <= {"raises", "skipped"}


def test_branch_on_values_is_a_finding_under_vmap():
    report = check(lambda x: x.sin() if x.sum() > 0 else x.cos(), normal(2))
    assert report.codes == ("HD407",), str(report)
    assert "vmap of values" in report.findings[0].route


def test_nondeterministic_function_is_a_finding():
    report = check(torch.rand_like, normal(2))
    assert report.codes == ("HD903",)
    assert "two calls with the same inputs differ" in report.findings[0].message


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("method", "moved"), [("matrices", 14), ("directions", 4), ("auto", 4)])
def test_method_sets_the_size_of_the_moved_point(method, moved, monkeypatch):
    sizes = []
    climb = by_routes.climb
    monkeypatch.setattr(
        by_routes, "climb", lambda problem, *rest: sizes.append(len(problem.point)) or climb(problem, *rest)
    )
    assert check(torch.sin, normal(14), method=method, vmap=False, scipy=False).ok
    assert set(sizes) == {moved}


@pytest.mark.slow
def test_surrogate_gradients_are_a_note():
    ste = straight_through(torch.round, lambda x: x.clone())
    report = check(ste, normal(4))
    assert report.codes == ("HD902",), str(report)
    assert report.ok
    assert "order 1" in report.findings[0].message


@pytest.mark.slow
def test_wrong_rules_of_a_surrogate_are_found():
    Doubled = custom("Doubled", lambda x: x.round(), lambda ctx, g: g.clone(), lambda ctx, t: 2 * t, vmap=True)

    errors = {finding.code for finding in check(Doubled, normal(3), approximate=True).errors}
    assert errors == {"HD102"}
    assert "HD109" in check(Doubled, normal(3)).codes


def in_float32(f):
    return lambda x: f(x.float()).to(x.dtype)


@pytest.mark.slow
def test_reference_judges_a_float32_only_function():
    x = normal(4, dtype=torch.float32)
    assert not check(in_float32(torch.sin), x).ok
    report = check(in_float32(torch.sin), x, reference=torch.sin)
    assert report.ok, str(report)
    assert "ulps in float32" in report.notes[0]
    assert {entry.quantity for entry in report.entries} >= {"vs reference"}


@pytest.mark.slow
def test_reference_finds_wrong_and_imprecise_derivatives():
    x = normal(4, dtype=torch.float32)
    assert not check(in_float32(torch.cos), x, reference=torch.sin).ok
    report = check(in_float32(lambda x: x.sin() * (1 + 1e-5)), x, reference=torch.sin, ulps=20)
    assert report.codes == ("HD113",), str(report)
    assert check(in_float32(torch.sin), x, reference=torch.sin, ulps=20).ok


def test_module_with_a_loss_is_checked_by_its_parameters():
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Tanh())
    report = check(module, normal(4, 3, dtype=torch.float32), loss=lambda y: y.square().mean())
    assert report.ok, str(report)
    assert any("8 numbers in parameters" in note for note in report.notes)


@pytest.mark.slow
def test_seed_determines_the_report_and_global_state_is_unchanged():
    x = normal(20)
    state = torch.get_rng_state()
    first, second = check(torch.tanh, x), check(torch.tanh, x)
    assert torch.equal(state, torch.get_rng_state())
    assert first == second
    assert check(torch.tanh, x, seed=1) != first


def test_inputs_are_left_unchanged():
    x = normal(3).requires_grad_()
    before = x.detach().clone()
    check(torch.sin, x)
    assert torch.equal(x, before)
    assert x.grad is None


@pytest.mark.slow
def test_fourth_order_compares_all_routes():
    report = check(lambda x: x.exp().sum(), normal(2), order=4, vmap=False)
    assert report.ok, str(report)
    assert sum(e.order == 4 and e.quantity == "vs differences" for e in report.entries) == 16


@pytest.mark.slow
def test_third_derivative_that_vanishes_near_kinks_passes():
    report = check(lambda x: F.max_pool2d(x, 2) ** 2, normal(1, 1, 6, 6), order=3, vmap=False)
    assert report.ok, str(report)


def test_order_vmap_and_scipy_options_select_comparisons():
    report = check(torch.sin, normal(2), order=1, vmap=False, scipy=False)
    assert {entry.route for entry in report.entries} == {"reverse", "forward", "gradcheck"}


@pytest.mark.slow
def test_compile_option_compares_compiled_code():
    report = check(lambda x: torch.tanh(x) * x, normal(3), compile="aot_eager", vmap=False)
    rows = [entry for entry in report.entries if entry.route == "compile"]
    assert {entry.quantity for entry in rows} >= {"value", "reverse", "forward-over-reverse"}
    assert report.ok, str(report)


@pytest.mark.parametrize(
    ("f", "inputs", "options", "message"),
    [
        (torch.ones(2), normal(2), {}, "check: f: expected a callable .* got Tensor"),
        (torch.sin, normal(2), {"order": 0}, "check: order: expected an int of 1 or more, got 0"),
        (torch.sin, normal(2), {"order": True}, "check: order: .* got True"),
        (torch.sin, (torch.arange(3),), {}, "check: inputs: .* got torch.int64"),
        (torch.sin, (), {}, "check: inputs: .* got nothing"),
        (torch.sin, torch.zeros(0), {}, "check: inputs: .* with elements"),
        (torch.sin, ({"w": normal(2).cfloat()},), {}, r"check: inputs\[0\]\['w'\]: expected a real tensor"),
        (lambda x: x.numpy(), normal(2), {}, r"check: f\(\*inputs\): expected tensors, got ndarray"),
        (lambda x: x.argmax(), normal(2), {}, r"check: f\(\*inputs\): expected a floating-point tensor"),
        (lambda x: torch.ones(2), normal(2), {}, "expected an output that depends"),
        (lambda x: torch.ones(2, requires_grad=True), normal(2), {}, "expected an output that depends"),
        (torch.sin, (normal(2), normal(2)), {}, "check: f: expected sin.* to run with 2 arguments, got TypeError"),
        (torch.sin, normal(2), {"method": "all"}, "check: method: expected one of 'auto', .* got 'all'"),
        (torch.sin, normal(2), {"loss": torch.sum}, "check: loss: expected None unless f is a torch.nn.Module"),
        (torch.sin, normal(2), {"reference": torch.sum}, "check: reference: expected outputs of shape"),
    ],
)
def test_rejects_bad_arguments(f, inputs, options, message):
    with pytest.raises(InputError, match=message):
        check(f, inputs, **options)


def test_works_inside_no_grad():
    with torch.no_grad():
        report = check(lambda x: (x**3).sum(), torch.tensor([1.0, 2.0], dtype=torch.float64))
    assert report.ok, report
    assert not report.codes


def test_gradient_inside_a_function_quotes_the_error_of_forward_mode():
    """Reverse mode is right, and the report quotes torch's error for forward mode."""

    def squared_slope(x):
        (slope,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
        return (slope**2).sum()

    report = check(squared_slope, torch.tensor([1.0, 2.0], dtype=torch.float64), vmap=False)
    status = {entry.route: entry.status for entry in report.entries if entry.quantity == "vs differences"}
    right = ("reverse", "reverse-over-reverse", "forward-over-reverse")
    assert status == {route: "ok" if route in right else "raises" for route in ("reverse", "forward", *hodiff.ROUTES)}
    assert "does not require grad" in " ".join(str(report).split())


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_non_finite_elements_that_f_masks_pass(value):
    x = torch.tensor([0.3, value, -1.2], dtype=torch.float64)
    report = hodiff.check(lambda x: torch.where(x.isfinite(), x, 0.0).pow(3).sum(), x)
    assert report.ok, str(report)


def test_works_inside_inference_mode():
    with torch.inference_mode():
        assert hodiff.check(torch.sin, torch.tensor([0.5, -1.2], dtype=torch.float64), scipy=False).codes == ()


@pytest.mark.parametrize("k", [2, 5])
def test_rejects_functions_that_raise_occasionally(k):
    calls = []

    def f(x):
        calls.append(1)
        if len(calls) == k:
            raise ValueError("lost connection")
        return x.sin()

    with pytest.raises(hodiff.InputError, match=r"runs in each call .* ValueError: lost connection"):
        hodiff.check(f, torch.ones(2, dtype=torch.float64))


def test_rejects_sparse_inputs():
    with pytest.raises(hodiff.InputError, match=r"check: inputs\[0\]: expected a dense tensor, got .* sparse_coo"):
        hodiff.check(lambda a: a.to_dense().sin(), torch.eye(2, dtype=torch.float64).to_sparse())


def test_repeated_warning_of_f_is_shown_once():
    """The numbers in the warning differ from point to point."""

    def f(x):
        warnings.warn(f"not solved: {float(x.sum()):.3e}", hodiff.HodiffWarning, stacklevel=2)
        return x.sin()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hodiff.check(f, torch.tensor([0.5, -1.2], dtype=torch.float64), vmap=False, scipy=False)
    assert sum("not solved" in str(each.message) for each in caught) == 1


POINT = torch.tensor([0.5, -1.2, 2.0], dtype=torch.float64)


class Complex(torch.autograd.Function):
    """Product of complex numbers."""

    generate_vmap_rule = True

    @staticmethod
    def forward(z, w):
        return z * w

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, g):
        z, w = ctx.saved_tensors
        return g * w.conj().resolve_conj(), g * z.conj().resolve_conj()

    @staticmethod
    @nestable_jvp
    def jvp(ctx, z_t, w_t):
        z, w = ctx.saved_tensors
        return z_t * w + z * w_t


def product_of_complex(a, b, c, d):
    return torch.view_as_real(Complex.apply(torch.complex(a, b), torch.complex(c, d)))


Overwriting = in_place_multiple("Overwriting", 3.0)


class Recomputing(torch.autograd.Function):
    """Saves its derivative for first order, and recomputes it for higher orders, as HD103 advises."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.sin(), x.cos()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs, output[1])
        ctx.save_for_forward(*inputs)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx, g, _):
        x, slope = ctx.saved_tensors
        return g * (x.cos() if torch.is_grad_enabled() else slope)

    @staticmethod
    @nestable_jvp
    def jvp(ctx, t):
        (x,) = ctx.saved_tensors
        return t * x.cos(), None


def seeded(x):
    """Return x² times the same random numbers in each call."""
    noise = torch.rand(x.shape, generator=torch.Generator(x.device.type).manual_seed(3), dtype=x.dtype)
    return x**2 * noise


FOUR = tuple(POINT.roll(i) for i in range(4))
NOT_ACCUSED = {
    "complex numbers": (product_of_complex, FOUR, {"vmap": False}),
    "what mark_dirty says": (Overwriting, POINT, {"vmap": False}),
    "a slope kept for first derivatives": (lambda x: Recomputing.apply(x)[0], POINT, {}),
    "a seeded generator": (seeded, POINT, {}),
    "fast waves": (lambda x: torch.sin(1e5 * x), POINT, {}),
    "faster waves": (lambda x: torch.sin(1e6 * x), POINT, {}),
    "small inputs": (lambda x: torch.sin(1e12 * x), 1e-12 * POINT, {}),
}


@pytest.mark.one_in(7)
@pytest.mark.parametrize("name", NOT_ACCUSED)
def test_right_functions_are_not_accused(name):
    f, inputs, options = NOT_ACCUSED[name]
    report = hodiff.check(f, inputs, scipy=False, **options)
    assert {each.code for each in report.findings} <= {"HD307", "HD410", "HD501"}, str(report)


@pytest.mark.parametrize("inputs", [(torch.zeros(2, 3, device="meta"),), (torch.zeros(2, 3),)])
def test_rejects_meta_and_fake_tensors(inputs):
    with pytest.raises(InputError, match=r'expected tensors with numbers, got one of shape .* on the device "meta"'):
        hodiff.check(torch.nn.Linear(3, 3, device="meta"), inputs)


class Lowered(torch.autograd.Function):
    """x @ w, whose gradient by x is wrong by a factor where autocast lowers the product."""

    generate_vmap_rule = True
    factor = 2.0

    @staticmethod
    def forward(x, w):
        return x @ w

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)
        ctx.factor = 1.0 if output.dtype == inputs[0].dtype else Lowered.factor

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return ctx.factor * g.to(w.dtype) @ w.T, x.T @ g.to(x.dtype)

    @staticmethod
    @nestable_jvp
    def jvp(ctx, x_t, w_t):
        x, w = ctx.saved_tensors
        return x_t @ w + x @ w_t


@pytest.mark.slow
def test_errors_under_autocast_only_are_found(monkeypatch):
    inputs = (normal(3, 4), normal(4, 2))

    def f(x, w):
        return Lowered.apply(x.tanh(), w).square()

    assert check(f, inputs, scipy=False, vmap=False).ok
    report = check(f, inputs, vmap=False, autocast=torch.bfloat16)
    assert report.errors, str(report)
    assert report.title.startswith("f under autocast to bfloat16")
    monkeypatch.setattr(Lowered, "factor", 1.0)
    assert check(f, inputs, vmap=False, autocast=torch.bfloat16).ok


def test_autocast_is_rejected_for_modules_and_float32():
    for f, dtype in ((torch.sin, torch.float32), (torch.nn.Linear(3, 3), torch.bfloat16)):
        with pytest.raises(
            InputError, match=r"check: autocast: expected torch\.bfloat16 or torch\.float16 for a function"
        ):
            check(f, POINT, autocast=dtype)


def test_works_under_another_default_device():
    x, layer = torch.linspace(0.5, 1.5, 4, dtype=torch.float64), torch.nn.Linear(2, 3).double()
    with torch.device("meta"):
        assert hodiff.check(lambda x: (x[1:] * x[:-1] ** 3).sum(), x).codes == ()
        assert hodiff.check(layer, x.view(2, 2)).codes == ()


@pytest.mark.parametrize("factor", [1, 2])
def test_jvp_written_with_torch_func_is_checked_by_routes(factor):
    """torch's gradcheck cannot nest forward mode; the routes can, and find a wrong factor."""

    class Pushed(Square):
        @staticmethod
        def jvp(ctx, tangent):
            return factor * torch.func.jvp(torch.square, ctx.saved_tensors, (tangent,))[1]

    report = check(Pushed, torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64))
    assert bool(report.errors) == (factor != 1)
    assert "HD406" not in report.codes
