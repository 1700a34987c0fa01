"""Each Function has one fault, and must give a finding on the right row."""

import pytest
import torch
from torch.autograd.forward_ad import _set_fwd_grad_enabled, unpack_dual
from torch.autograd.function import Function, once_differentiable

from hodiff import CheckError
from hodiff.checks import check

X = torch.tensor([0.5, -1.2, 2.0], dtype=torch.float64)


class Cube(Function):
    """Correct by every route."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x**3

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, g):
        return 3 * ctx.saved_tensors[0] ** 2 * g

    @staticmethod
    def jvp(ctx, t):
        # Torch runs jvp with forward mode off, so that an outer forward pass would see a constant.
        with _set_fwd_grad_enabled(True):
            return 3 * unpack_dual(ctx.saved_tensors[0], level=0).primal ** 2 * t


class PlainTangent(Cube):
    @staticmethod
    def jvp(ctx, t):
        return 3 * ctx.saved_tensors[0] ** 2 * t


class DoubledTangent(Cube):
    @staticmethod
    def jvp(ctx, t):
        return 2 * Cube.jvp(ctx, t)


class ConstantTangent(Cube):
    @staticmethod
    def setup_context(ctx, inputs, output):
        Cube.setup_context(ctx, inputs, output)
        ctx.slope = 3 * inputs[0].detach() ** 2

    @staticmethod
    def jvp(ctx, t):
        return ctx.slope * t


class WrongGradient(Cube):
    @staticmethod
    def backward(ctx, g):
        return 2 * ctx.saved_tensors[0] ** 2 * g


class ZeroGradient(Cube):
    @staticmethod
    def backward(ctx, g):
        return torch.zeros_like(g)


class SavedIntermediate(Cube):
    @staticmethod
    def setup_context(ctx, inputs, output):
        Cube.setup_context(ctx, inputs, output)
        ctx.square = (inputs[0] ** 2).detach()

    @staticmethod
    def backward(ctx, g):
        return 3 * ctx.square * g


class DetachedCotangent(Cube):
    """Correct for a constant cotangent, so that routes show the defect only for a nonlinear loss."""

    @staticmethod
    def backward(ctx, g):
        return 3 * ctx.saved_tensors[0] ** 2 * g.detach()


class OnceDifferentiable(Cube):
    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        return 3 * ctx.saved_tensors[0] ** 2 * g


class NoTangent(Cube):
    jvp = Function.jvp


class NoContext(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, g):
        return 3 * ctx.saved_tensors[0] ** 2 * g


class WrongThirdOrder(Cube):
    """The Hessian is right; its derivative is cut."""

    @staticmethod
    def backward(ctx, g):
        return CutSlope.apply(ctx.saved_tensors[0]) * g


class CutSlope(Cube):
    @staticmethod
    def forward(x):
        return 3 * x**2

    @staticmethod
    def backward(ctx, g):
        return 6 * ctx.saved_tensors[0].detach() * g

    @staticmethod
    def jvp(ctx, t):
        with _set_fwd_grad_enabled(True):
            return 6 * unpack_dual(ctx.saved_tensors[0], level=0).primal * t


class WrongBatching(Cube):
    generate_vmap_rule = False

    @staticmethod
    def vmap(info, in_dims, x):
        return 2 * Cube.apply(x), in_dims[0]


class WrongAxis(Cube):
    """Correct only if the batch dimension is the first."""

    generate_vmap_rule = False

    @staticmethod
    def vmap(info, in_dims, x):
        return Cube.apply(x), 0


class NoBatching(Cube):
    generate_vmap_rule = False


class CoarseInside(Cube):
    @staticmethod
    def forward(x):
        return (x.float() ** 3).to(x.dtype)


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


class TwoDefects(Cube):
    """A wrong factor, and a detached input."""

    generate_vmap_rule = False

    @staticmethod
    def backward(ctx, g):
        return ctx.saved_tensors[0].detach() ** 2 * g

    @staticmethod
    def vmap(info, in_dims, x):
        return 2 * Cube.apply(x), in_dims[0]


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
