"""Each Function has one fault, and must give a finding on the right row."""

import pytest
import torch
from custom_functions import cubed_slope, custom, old_style
from torch.autograd.forward_ad import _set_fwd_grad_enabled, unpack_dual
from torch.autograd.function import Function, once_differentiable

from hodiff import CheckError
from hodiff.checks import check

X = torch.tensor([0.5, -1.2, 2.0], dtype=torch.float64)


def cubed_tangent(ctx, t):
    # Torch runs jvp with forward mode off, so that an outer forward pass would see a constant.
    with _set_fwd_grad_enabled(True):
        return 3 * unpack_dual(ctx.saved_tensors[0], level=0).primal ** 2 * t


def doubled_in_batches(info, in_dims, x):
    return 2 * Cube.apply(x), in_dims[0]


# Correct by every route
Cube = custom("Cube", lambda x: x**3, cubed_slope, cubed_tangent, vmap=True)


def cube_with(name, **members):
    """Return a Function with some rules of the cube replaced."""
    rules = {key: staticmethod(each) if callable(each) else each for key, each in members.items()}
    return type(name, (Cube,), rules)


def keeps(name, value):
    """Return a rule that also keeps a detached value on the context."""

    def setup_context(ctx, inputs, output):
        Cube.setup_context(ctx, inputs, output)
        setattr(ctx, name, value(inputs[0].detach()))

    return setup_context


def slope_of_cut(ctx, t):
    with _set_fwd_grad_enabled(True):
        return 6 * unpack_dual(ctx.saved_tensors[0], level=0).primal * t


PlainTangent = cube_with("PlainTangent", jvp=cubed_slope)
DoubledTangent = cube_with("DoubledTangent", jvp=lambda ctx, t: 2 * cubed_tangent(ctx, t))
ConstantTangent = cube_with(
    "ConstantTangent", setup_context=keeps("slope", lambda x: 3 * x**2), jvp=lambda ctx, t: ctx.slope * t
)
WrongGradient = cube_with("WrongGradient", backward=lambda ctx, g: 2 * ctx.saved_tensors[0] ** 2 * g)
ZeroGradient = cube_with("ZeroGradient", backward=lambda ctx, g: torch.zeros_like(g))
SavedIntermediate = cube_with(
    "SavedIntermediate", setup_context=keeps("square", torch.square), backward=lambda ctx, g: 3 * ctx.square * g
)
# Correct for a constant cotangent, so that routes show the defect only for a nonlinear loss
DetachedCotangent = cube_with("DetachedCotangent", backward=lambda ctx, g: cubed_slope(ctx, g.detach()))
OnceDifferentiable = cube_with("OnceDifferentiable", backward=once_differentiable(cubed_slope))
NoTangent = cube_with("NoTangent", jvp=Function.jvp)
NoContext = old_style("NoContext", lambda x: (x**3, x), cubed_slope)
# The Hessian is right; its derivative is cut.
CutSlope = cube_with(
    "CutSlope",
    forward=lambda x: 3 * x**2,
    backward=lambda ctx, g: 6 * ctx.saved_tensors[0].detach() * g,
    jvp=slope_of_cut,
)
WrongThirdOrder = cube_with("WrongThirdOrder", backward=lambda ctx, g: CutSlope.apply(ctx.saved_tensors[0]) * g)
WrongBatching = cube_with("WrongBatching", generate_vmap_rule=False, vmap=doubled_in_batches)
# Correct only if the batch dimension is the first
WrongAxis = cube_with("WrongAxis", generate_vmap_rule=False, vmap=lambda info, in_dims, x: (Cube.apply(x), 0))
NoBatching = cube_with("NoBatching", generate_vmap_rule=False)
CoarseInside = cube_with("CoarseInside", forward=lambda x: (x.float() ** 3).to(x.dtype))


# Function, order, codes, and text of the evidence
WRONG = [
    (DoubledTangent, 2, {"HD102"}, "jvp of DoubledTangent"),
    (ConstantTangent, 2, {"HD304"}, "ctx.slope"),
    (WrongGradient, 2, {"HD101"}, "0.666667 times the derivative"),
    (ZeroGradient, 2, {"HD101"}, "gradient of x in ZeroGradient is zero"),
    (SavedIntermediate, 2, {"HD304"}, "ctx.square"),
    (DetachedCotangent, 2, {"HD116"}, "detaches its incoming gradient"),
    (OnceDifferentiable, 2, {"HD107"}, "once_differentiable"),
    (NoTangent, 2, {"HD401"}, "forward mode"),
    (NoContext, 2, {"HD405"}, "setup_context"),
    (WrongThirdOrder, 3, {"HD104"}, "CutSlope.backward"),
    (WrongBatching, 2, {"HD402"}, "vmap of values"),
    (WrongAxis, 2, {"HD402"}, "vmap"),
    (NoBatching, 2, {"HD403"}, "generate_vmap_rule"),
    (CoarseInside, 2, {"HD306"}, "lower precision"),
]


@pytest.mark.one_in(15)
@pytest.mark.parametrize(("function", "order", "codes", "words"), WRONG)
def test_wrong_function_has_the_expected_finding(function, order, codes, words):
    report = check(function, X, order=order, scipy=False)
    errors = {finding.code for finding in report.findings if finding.severity == "error"}
    assert errors == codes, str(report)
    assert any(words in text for finding in report.findings for text in (finding.cause, *finding.evidence)), str(report)
    assert all(finding.location for finding in report.errors), str(report)
    with pytest.raises(CheckError, match=min(codes)):
        report.raise_on_failure()


@pytest.mark.slow
def test_forward_mode_that_does_not_nest_is_a_warning():
    """hodiff's transforms correct it; torch alone is wrong."""
    report = check(PlainTangent, X)
    assert (report.ok, report.codes) == (True, ("HD410",)), str(report)
    assert any("PlainTangent" in text for text in report.findings[0].evidence)
    report = check(PlainTangent, X, correct=False)
    assert report.codes == ("HD114",), str(report)
    assert any("forward-over-forward is wrong" in text for text in report.findings[0].evidence)


# A wrong factor, and a detached input
TwoDefects = cube_with(
    "TwoDefects",
    generate_vmap_rule=False,
    backward=lambda ctx, g: ctx.saved_tensors[0].detach() ** 2 * g,
    vmap=doubled_in_batches,
)


def test_several_defects_are_all_named():
    assert set(check(TwoDefects, X).codes) == {"HD101", "HD104", "HD402"}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_right_function_has_no_finding(dtype):
    report = check(Cube, X.to(dtype), order=3)
    assert report.ok, str(report)
    report.raise_on_failure()
    checks = {entry.route for entry in report.entries}
    assert {"gradcheck", "gradgradcheck", "vmap of values", "forward-over-forward-over-forward"} <= checks
    assert not [entry for entry in report.entries if entry.status == "skipped"]


@pytest.mark.slow
def test_only_wrong_routes_fail():
    report = check(SavedIntermediate, X)
    failed = {entry.route for entry in report.entries if entry.failed and "-over-" in entry.route}
    assert failed == {"reverse-over-reverse", "forward-over-reverse"}


def test_gradcheck_runs_reverse_and_forward_separately():
    report = check(DoubledTangent, X, order=1, vmap=False)
    by_quantity = {e.quantity: e.status for e in report.entries if e.route == "gradcheck"}
    assert by_quantity == {"reverse": "ok", "forward": "fails"}


@pytest.mark.slow
def test_compiled_code_that_ignores_the_jvp_is_found():
    """torch.compile derives its own tangent, and ignores the Function's jvp."""
    report = check(DoubledTangent, X, compile="aot_eager", vmap=False, scipy=False)
    failed = {entry.quantity for entry in report.entries if entry.route == "compile" and entry.failed}
    assert failed == {"forward", "reverse-over-forward"}, str(report)
