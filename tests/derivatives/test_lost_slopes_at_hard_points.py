"""Detached factors in backward are detected where finite differences are inaccurate; correct Functions pass."""

from typing import Any

import pytest
import torch
from custom_functions import cubed_slope, old_style
from torch.autograd.function import once_differentiable

import hodiff
from hodiff.errors import RouteError
from hodiff.recompute.slopes import can_run_again

D = torch.float64
X = torch.tensor([0.3, 1.2], dtype=D)
V = torch.ones_like(X)


def _assert_hvp_raises(f: Any, x: torch.Tensor, v: torch.Tensor | None = None) -> None:
    with pytest.raises(RouteError, match=r"\.backward \(test_lost_slopes_at_hard_points\.py:\d+\) takes"):
        hodiff.hvp(lambda x: f(x).sum(), x, torch.ones_like(x) if v is None else v)


class Silu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dtype):
        s = x.sigmoid()
        ctx.save_for_backward(x, s.to(dtype))
        return x * s

    @staticmethod
    def backward(ctx, g):
        x, s = ctx.saved_tensors
        return g * s.to(x.dtype) * (1 + x * (1 - s.to(x.dtype))), None


class Child(Silu):
    @staticmethod
    def backward(ctx, g):
        return Silu.backward(ctx, g)


class GrandChild(Silu):
    @staticmethod
    def backward(ctx, g):
        return super(GrandChild, GrandChild).backward(ctx, g)


@pytest.mark.parametrize("kind", [Child, GrandChild])
def test_inherited_backward_is_checked(kind: Any) -> None:
    _assert_hvp_raises(lambda x: kind.apply(x, D), X)


class CallsBackward(Silu):
    """Its backward names another Function and calls `backward` of a tensor."""

    @staticmethod
    def backward(ctx, g):
        with torch.enable_grad():
            LogSumExp.apply(OUTSIDE * 2).backward()
        return Silu.backward(ctx, g)


OUTSIDE = torch.ones(2, dtype=D, requires_grad=True)


def test_functions_whose_backward_calls_backward_are_not_rerun() -> None:
    assert not can_run_again(CallsBackward)
    assert all(map(can_run_again, (Silu, Child, GrandChild)))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kept", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("n", [5, 50, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, D])
def test_slope_kept_in_low_precision_is_rejected(n: int, kept: torch.dtype, dtype: torch.dtype) -> None:
    _assert_hvp_raises(lambda x: Silu.apply(x, kept), torch.linspace(-2, 2, n, dtype=dtype))


class FastSine(torch.autograd.Function):
    """sin(10 x), which saves its slope, and keeps a constant of low precision beside it."""

    @staticmethod
    def forward(ctx, x):
        ctx.other = torch.ones(3, dtype=torch.bfloat16)
        ctx.save_for_backward(10 * (10 * x).cos())
        return (10 * x).sin()

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0]


def test_slope_kept_from_a_low_precision_intermediate_is_rejected() -> None:
    _assert_hvp_raises(FastSine.apply, X)


class LogSumExp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.probabilities = x.softmax(0)
        return x.logsumexp(0)

    @staticmethod
    def backward(ctx, g):
        return g * ctx.probabilities


@pytest.mark.parametrize("masked", [0.0, -torch.inf])
def test_slope_beside_infinite_masks_is_rejected(masked: float) -> None:
    mask = torch.tensor([0.0, masked, 0.0], dtype=D)
    _assert_hvp_raises(lambda x: LogSumExp.apply(x + mask), torch.tensor([0.3, 0.2, 1.2], dtype=D))


class OnProbabilities(torch.autograd.Function):
    @staticmethod
    def forward(ctx, p):
        if not ((p >= 0) & (p <= 1)).all():
            raise ValueError("no probability")
        ctx.save_for_backward(p)
        ctx.log = p.log()
        return p * p * ctx.log

    @staticmethod
    def backward(ctx, g):
        (p,) = ctx.saved_tensors
        return g * p * (2 * ctx.log + 1)


@pytest.mark.parametrize("last", [1.0, 0.5])
def test_slope_at_the_edge_of_a_domain_is_rejected(last: float) -> None:
    _assert_hvp_raises(OnProbabilities.apply, torch.tensor([0.3, last], dtype=D))


def _slope_of_two_sizes(ctx, g):
    x, e = ctx.saved_tensors
    return torch.stack([g[0] * 1000 * x[0].cos(), g[1] * e])


OfTwoSizes = old_style(
    "OfTwoSizes",
    lambda x: (torch.stack([1000 * x[0].sin(), x[1].exp()]), x, x[1].exp()),
    _slope_of_two_sizes,
)


def test_small_component_beside_large_ones_is_rejected() -> None:
    _assert_hvp_raises(OfTwoSizes.apply, X, torch.tensor([0.0, 1.0], dtype=D))


class ByFlag(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, right):
        ctx.right = right
        ctx.save_for_backward(x, x.cos())
        return x.sin()

    @staticmethod
    def backward(ctx, g):
        x, cosine = ctx.saved_tensors
        return g * (x.cos() if ctx.right else cosine), None


def test_new_branch_dtype_or_argument_is_checked_again() -> None:
    flag = {"right": True}

    def f(x: torch.Tensor) -> torch.Tensor:
        return ByFlag.apply(x, flag["right"])

    for _ in range(2):  # a third call is not checked
        torch.testing.assert_close(hodiff.hvp(lambda x: f(x).sum(), X, V), -X.sin())
    flag["right"] = False
    with pytest.raises(RouteError, match=r"ByFlag\.backward"):
        hodiff.hvp(lambda x: f(x).sum(), X, V)
    for dtype in (torch.bfloat16, torch.float16):
        hodiff.hvp(lambda x: f(x).sum(), X.to(dtype), V.to(dtype))
    with pytest.raises(RouteError, match=r"ByFlag\.backward"):
        hodiff.hvp(lambda x: f(x).sum(), X.float(), V.float())


WRONG = {
    "takes a part": lambda g, x, s: g * s * (1 + x * (1 - s)),
    "takes": lambda g, x, s: g * s,
    "is not linear": lambda g, x, s: (g * x.sigmoid()).clamp(-0.1, 0.1),
}


@pytest.mark.parametrize("what", WRONG)
def test_functions_beside_a_refused_one_are_checked(what: str) -> None:
    def backward(ctx, g):
        return WRONG[what](g, *ctx.saved_tensors)

    pair = [old_style(name, lambda x: (x * x.sigmoid(), x, x.sigmoid()), backward) for name in ("One", "Other")]

    def f(x: torch.Tensor, functions: list[Any]) -> torch.Tensor:
        return sum(function.apply(x).sum() for function in functions)

    for functions in (pair, pair, pair[:1], pair[1:]):  # a third call of a Function that passed is not checked
        with pytest.raises(RouteError, match=rf"\.backward .* {what}"):
            hodiff.hvp(f, X, V, functions)


def _slopes_by_mean(ctx, g):
    x, w = ctx.saved_tensors
    return 2 * g * x * w.mean().detach(), (g * x.square()).sum().expand_as(w) / len(w)


ByMean = old_style("ByMean", lambda x, w: (x.square() * w.mean(), x, w), _slopes_by_mean)


def test_parameter_that_requires_grad_later_is_checked_again() -> None:
    w = torch.tensor([3.0, 5.0], dtype=D)
    for calls in range(6):
        for _ in range(calls):
            torch.testing.assert_close(hodiff.hvp(lambda x: ByMean.apply(x, w).sum(), X, V), 8 * V)
        required = w.clone().requires_grad_()
        product = hodiff.hvp(lambda x, w=required: ByMean.apply(x, w).sum() + (w * x).sum() ** 2, X, V)
        with pytest.raises(RouteError, match=r"ByMean\.backward"):
            torch.autograd.grad(product.sum(), required)


Once = old_style("Once", lambda w: (w.exp(), w), once_differentiable(lambda ctx, g: g * ctx.saved_tensors[0].exp()))


def test_functions_outside_the_graph_of_the_point_are_allowed() -> None:
    w = torch.tensor([0.5, -0.2], dtype=D, requires_grad=True)
    product = hodiff.hvp(lambda x: (Once.apply(w) * x**3).sum(), X, V)
    torch.testing.assert_close(product, 6 * X * w.exp())
    torch.testing.assert_close(torch.autograd.grad(product.sum(), w)[0], 6 * X * w.exp())
    with pytest.raises(RouteError, match="once_differentiable"):
        hodiff.hvp(lambda x: Once.apply(x).sum(), X, V)


SkipsZeros = old_style(
    "SkipsZeros",
    lambda x: (x**3, x),
    lambda ctx, g: cubed_slope(ctx, g) if g.any() else torch.zeros_like(g),
)


def test_zeros_without_graph_for_zero_cotangents_are_rejected() -> None:
    y = X**3
    with pytest.raises(RouteError, match="zeros without a graph for a cotangent that is zero here"):
        hodiff.hvp(lambda x: (SkipsZeros.apply(x) - y).square().sum(), X, V)
    torch.testing.assert_close(hodiff.hvp(lambda x: 0.0 * SkipsZeros.apply(x).sum(), X, V), 0 * X)
    torch.testing.assert_close(hodiff.hvp(lambda x: SkipsZeros.apply(x).sum(), X, V), 6 * X)


def test_sparse_hessian_and_operator_raise_route_error() -> None:
    for derivative in (
        lambda: hodiff.sparse.hessian(lambda x: OfTwoSizes.apply(x).sum())(X),
        lambda: hodiff.HessianOperator(lambda x: OfTwoSizes.apply(x).sum(), X) @ V,
    ):
        with pytest.raises(RouteError):
            derivative()
