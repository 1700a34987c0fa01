"""Each Function is wrong in one way, and each must come out as a finding on the right row."""

import pytest
import torch
from torch.autograd.forward_ad import _set_fwd_grad_enabled, unpack_dual
from torch.autograd.function import Function, once_differentiable

from hodiff import CheckError
from hodiff.checks import check

X = torch.tensor([0.5, -1.2, 2.0], dtype=torch.float64)


class Cube(Function):
    """Right in every route."""

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
    """Right under a constant incoming gradient, so that only a curved loss shows it by the routes."""

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
    """Right only if the batch comes first."""

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


SECOND_FORWARD = {"reverse-over-forward", "forward-over-forward"}

# Function, order, kind, the routes and checks that must carry the finding, words of the remedy
WRONG = [
    (PlainTangent, 2, "zero", {"forward-over-forward"}, "forward mode off"),
    (DoubledTangent, 1, "wrong", {"forward"}, "jvp"),
    (ConstantTangent, 2, "zero", {"reverse-over-forward"}, "save_for_forward"),
    (ConstantTangent, 2, "zero", {"forward-over-forward"}, "mend that first"),
    (WrongGradient, 1, "wrong", {"reverse"}, "backward"),
    (ZeroGradient, 1, "zero", {"reverse"}, "detach"),
    (SavedIntermediate, 2, "zero", {"reverse-over-reverse", "forward-over-reverse"}, "intermediate"),
    (DetachedCotangent, 2, "wrong", {"reverse-over-reverse", "forward-over-reverse"}, "backward"),
    (OnceDifferentiable, 2, "zero", {"reverse-over-reverse"}, "once_differentiable"),
    (NoTangent, 1, "raises", {"forward", "forward-over-reverse", *SECOND_FORWARD}, "jvp staticmethod"),
    (NoContext, 0, "raises", {"reverse", "forward", "vmap of values", *SECOND_FORWARD}, "setup_context"),
    (WrongThirdOrder, 3, "zero", {"reverse-over-reverse-over-reverse"}, "lower order"),
    (WrongBatching, 0, "wrong", {"vmap of values"}, "in_dims"),
    (WrongAxis, 0, "wrong", {"vmap of values"}, "in_dims"),
    (NoBatching, 0, "raises", {"vmap of values"}, "generate_vmap_rule"),
    (CoarseInside, 0, "float64", {"f"}, "lower precision"),
]


@pytest.mark.parametrize(("function", "order", "kind", "routes", "remedy"), WRONG)
def test_finding(function, order, kind, routes, remedy):
    report = check(function, X, order=max(order, 2), scipy=False)
    carriers = [f for f in report.findings if f.kind == kind and routes <= set(f.route.split(", "))]
    assert carriers, str(report)
    assert any(f.order <= order and remedy in f.remedy for f in carriers), str(report)
    with pytest.raises(CheckError, match=f"\\[{kind}\\]"):
        report.raise_on_failure()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_right_function_has_no_finding(dtype):
    report = check(Cube, X.to(dtype), order=3)
    assert report.ok, str(report)
    report.raise_on_failure()
    checks = {entry.route for entry in report.entries}
    assert {"gradcheck", "gradgradcheck", "vmap of values", "forward-over-forward-over-forward"} <= checks
    assert not [entry for entry in report.entries if entry.status == "skipped"]


def test_rows_blame_only_the_wrong_routes():
    report = check(SavedIntermediate, X)
    failed = {entry.route for entry in report.entries if entry.failed and "-over-" in entry.route}
    assert failed == {"reverse-over-reverse", "forward-over-reverse"}


def test_gradcheck_switches_are_separate():
    report = check(DoubledTangent, X, order=1, vmap=False)
    by_quantity = {e.quantity: e.status for e in report.entries if e.route == "gradcheck"}
    assert by_quantity == {"reverse": "ok", "forward": "fails"}


def test_compiled_code_that_ignores_a_jvp():
    """The tangent that torch.compile makes is not the one that the Function states."""
    report = check(DoubledTangent, X, compile="aot_eager", vmap=False, scipy=False)
    failed = {entry.quantity for entry in report.entries if entry.route == "compile" and entry.failed}
    assert failed == {"forward", "reverse-over-forward"}, str(report)
