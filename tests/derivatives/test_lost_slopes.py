"""Functions whose backward takes its slope for a constant: refused where it is none, and at no other time."""

import os
from functools import partial
from typing import Any

import pytest
import torch
import torch.utils.checkpoint

import hodiff
from hodiff import RouteError

X = torch.tensor([0.5, -1.2], dtype=torch.float64)
V = torch.ones_like(X)
ZERO = torch.zeros_like(X)


class Times(torch.autograd.Function):
    """A backward that multiplies by what forward kept."""

    @staticmethod
    def forward(ctx, x):
        raise NotImplementedError

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0]


class SavedCosine(Times):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.cos())
        return x.sin()


class KeptOnContext(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.slope = 2 * x
        return x * x

    @staticmethod
    def backward(ctx, g):
        return g * ctx.slope


class Detached(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, g):
        return 2 * g * ctx.saved_tensors[0].detach()


class SlopeByNumPy(Detached):
    @staticmethod
    def backward(ctx, g):
        return g * torch.from_numpy(2 * ctx.saved_tensors[0].detach().numpy())


class Unrecorded(Detached):
    @staticmethod
    def backward(ctx, g):
        with torch.no_grad():
            return 2 * g * ctx.saved_tensors[0]


LOST = (SavedCosine, KeptOnContext, Detached, SlopeByNumPy)


@pytest.mark.parametrize("function", LOST)
@pytest.mark.parametrize("x", [X, ZERO], ids=["anywhere", "at zero"])
def test_a_slope_that_is_no_constant_is_refused(function: Any, x: torch.Tensor) -> None:
    for f in (lambda x: function.apply(x).sum(), lambda x: function.apply(x).pow(2).sum() + x.pow(3).sum()):
        for derivative in (
            lambda f, x: hodiff.hvp(f, x, V),
            lambda f, x: hodiff.hessian_matrix(f, x),
            lambda f, x: hodiff.value_grad_hvp(f, x, V),
            lambda f, x: hodiff.HessianOperator(f, x) @ V,
        ):
            with pytest.raises(RouteError, match=rf"{function.__name__}\.backward \(test_lost_slopes\.py:\d+\)"):
                derivative(f, x)


def test_zeros_at_a_point_where_the_slope_is_zero() -> None:
    with pytest.raises(RouteError, match=r"Unrecorded\.backward"):
        hodiff.hvp(lambda x: Unrecorded.apply(x).sum(), ZERO, V)


def test_in_float32() -> None:
    with pytest.raises(RouteError, match=r"SavedCosine\.backward"):
        hodiff.hvp(lambda x: SavedCosine.apply(x).sum(), X.float(), V.float())


def test_first_derivatives_are_left() -> None:
    torch.testing.assert_close(hodiff.JacobianOperator(SavedCosine.apply, X) @ V, X.cos())


def test_a_derivative_of_elementwise_that_records_nothing() -> None:
    @torch.no_grad()
    def slope(x, y):
        return 2 * x

    square = hodiff.elementwise(lambda x: x * x, derivative=slope)
    with pytest.raises(RouteError, match="takes its slope for a constant"):
        hodiff.hvp(lambda x: square(x).sum(), X, V)


class SavedFactor(torch.autograd.Function):
    """exp(a b), whose backward reads its arguments and the value without a graph."""

    @staticmethod
    def forward(ctx, a, b):
        value = (a * b).exp()
        ctx.save_for_backward(a, b, value.clone())
        return value

    @staticmethod
    def backward(ctx, g):
        a, b, value = ctx.saved_tensors
        return g * b * value, g * a * value


class WithMask(SavedFactor):
    @staticmethod
    def forward(ctx, a, b, mask):
        value = (a * b).exp() * mask
        ctx.save_for_backward(a, b, value.clone(), mask)
        return value

    @staticmethod
    def backward(ctx, g):
        a, b, value, _ = ctx.saved_tensors
        return g * b * value, g * a * value, None


class FactorOnContext(SavedFactor):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        ctx.value = (a * b).exp()
        return ctx.value.clone()

    @staticmethod
    def backward(ctx, g):
        a, b = ctx.saved_tensors
        return g * b * ctx.value, g * a * ctx.value


class DetachedFactor(SavedFactor):
    """Keeps its arguments alone, and detaches one of them in a part of its backward."""

    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return (a * b).exp()

    @staticmethod
    def backward(ctx, g):
        a, b = ctx.saved_tensors
        return g * b * (a * b.detach()).exp(), g * a * (a * b).exp()


class FactorWithoutGrad(DetachedFactor):
    @staticmethod
    def backward(ctx, g):
        a, b = ctx.saved_tensors
        with torch.no_grad():
            value = (a * b).exp()
        return g * b * value, g * a * value


class Recomputed(SavedFactor):
    """Takes the value that it saved only where nobody differentiates what it does."""

    @staticmethod
    def backward(ctx, g):
        a, b, value = ctx.saved_tensors
        value = (a * b).exp() if torch.is_grad_enabled() else value
        return g * b * value, g * a * value


class Completed(SavedFactor):
    """Takes the value that it saved, with the derivative of another expression."""

    @staticmethod
    def backward(ctx, g):
        a, b, value = ctx.saved_tensors
        exponential = (a * b).exp()
        value = value + (exponential - exponential.detach())
        return g * b * value, g * a * value


def _by_factor(function: Any, *others: Any) -> Any:
    return lambda x: function.apply(x, x.cos(), *others).square().sum()


def _true_product() -> torch.Tensor:
    """Second derivative of exp(u), u = 2 x cos(x), by hand."""
    u, first, second = 2 * X * X.cos(), 2 * X.cos() - 2 * X * X.sin(), -4 * X.sin() - 2 * X * X.cos()
    return u.exp() * (first**2 + second)


@pytest.mark.parametrize("function", [SavedFactor, FactorOnContext, DetachedFactor, FactorWithoutGrad])
def test_a_slope_that_is_lost_in_part_is_refused(function: Any) -> None:
    for _ in range(2):
        with pytest.raises(RouteError, match=rf"{function.__name__}\.backward .* a part of its slope for a constant"):
            hodiff.hvp(_by_factor(function), X, V)


def test_a_slope_that_is_lost_in_part_under_hooks_is_refused() -> None:
    def f(x):
        with torch.autograd.graph.save_on_cpu():
            return _by_factor(SavedFactor)(x)

    with pytest.raises(RouteError, match="a part of its slope for a constant"):
        hodiff.hvp(f, X, V)


CHECKPOINTS = {
    "reentrant": partial(torch.utils.checkpoint.checkpoint, use_reentrant=True),
    "non-reentrant": partial(torch.utils.checkpoint.checkpoint, use_reentrant=False),
    "hodiff's": hodiff.functions.checkpoint,
    "nested": lambda f, x: hodiff.functions.checkpoint(partial(hodiff.functions.checkpoint, f), x),
}


@pytest.mark.parametrize("checkpoint", CHECKPOINTS.values(), ids=CHECKPOINTS)
@pytest.mark.parametrize("function", [SavedCosine, KeptOnContext, SavedFactor, DetachedFactor])
def test_slopes_that_are_lost_inside_of_a_checkpoint_are_refused(function: Any, checkpoint: Any) -> None:
    def block(x):
        return (function.apply(x, x.cos()) if issubclass(function, SavedFactor) else function.apply(x)).square()

    for derivative in (hodiff.hessian_matrix, lambda f, x: hodiff.hvp(f, x, V)):
        with pytest.raises(RouteError, match=rf"{function.__name__}\.backward \(test_lost_slopes\.py:\d+\)"):
            derivative(lambda x: checkpoint(block, x).sum(), X)


@pytest.mark.parametrize("checkpoint", CHECKPOINTS.values(), ids=CHECKPOINTS)
def test_a_right_function_inside_of_a_checkpoint_is_looked_at_less_and_less_often(checkpoint: Any) -> None:
    calls = 0

    def block(x):
        nonlocal calls
        calls += 1
        return Recomputed.apply(x, x.cos()).square()

    counts = []
    for _ in range(8):
        before = calls
        torch.testing.assert_close(hodiff.hvp(lambda x: checkpoint(block, x).sum(), X, V), _true_product())
        counts.append(calls - before)
    assert [each > min(counts) for each in counts] == [True, True, False, True, False, False, False, True]


@pytest.mark.parametrize("function", [Recomputed, Completed])
def test_what_is_kept_and_loses_nothing_is_right(function: Any) -> None:
    torch.testing.assert_close(hodiff.hvp(_by_factor(function), X, V), _true_product())


def test_what_may_be_a_detached_argument_is_told_once() -> None:
    """`WithMask` keeps two constants, of which its argument is one."""
    f = _by_factor(WithMask, torch.ones_like(X))
    with pytest.warns(hodiff.HodiffWarning, match="an argument that was detached on purpose loses nothing"):
        first = hodiff.hvp(f, X, V)
    torch.testing.assert_close(hodiff.HessianOperator(f, X) @ V, first)


class Masked(Times):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward((x > 0).to(x))
        return x.relu()


class Weighted(Times):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(torch.arange(x.numel()).to(x))
        return ctx.to_save[0] * x


class Dropout(Times):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(2 * (torch.rand_like(x) > 0.5).to(x))
        return ctx.to_save[0] * x


class Noise(Times):
    """Numbers that no seed repeats."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(torch.tensor(list(os.urandom(x.numel()))).to(x))
        return ctx.to_save[0] * x


class Scaled(Times):
    """By a tensor that its caller may detach."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(scale)
        return scale * x

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0], None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("function", [Masked, Weighted, Dropout, Noise, lambda x: Scaled.apply(x, x.exp().detach())])
def test_what_is_linear_piecewise_or_by_choice_is_zero(function: Any, dtype: torch.dtype) -> None:
    apply = getattr(function, "apply", function)
    x = torch.linspace(-1, 1, 5000, dtype=dtype)
    state = torch.get_rng_state()
    assert not hodiff.hvp(lambda x: apply(x).sum(), x, x).any()
    torch.set_rng_state(state)
    # The draw of the one evaluation that counts is the user's.
    apply(x)
    after = torch.get_rng_state()
    torch.set_rng_state(state)
    hodiff.hvp(lambda x: apply(x).sum(), x, x)
    assert torch.equal(torch.get_rng_state(), after)


def test_it_is_looked_at_less_and_less_often() -> None:
    calls = 0

    def f(x):
        nonlocal calls
        calls += 1
        return Weighted.apply(x).pow(2).sum()

    counts = []
    for _ in range(8):
        before = calls
        hodiff.hvp(f, X, V)
        counts.append(calls - before)
    assert [each > 1 for each in counts] == [True, True, False, True, False, False, False, True]


def test_a_function_that_takes_no_other_point_is_left() -> None:
    def f(x):
        if not torch.equal(x.detach(), X):
            raise ValueError("only there")
        return Weighted.apply(x).pow(2).sum()

    torch.testing.assert_close(hodiff.hvp(f, X, V), torch.tensor([0.0, 2.0], dtype=torch.float64))
