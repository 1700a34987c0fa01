"""Functions whose backward detaches a factor from the input: hodiff raises, unless the factor is constant."""

import cProfile
import gc
import itertools
import os
import sys
import warnings
import weakref
from functools import partial
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from custom_functions import custom, old_style

import hodiff
from hodiff import RouteError

X = torch.tensor([0.5, -1.2], dtype=torch.float64)
V = torch.ones_like(X)
ZERO = torch.zeros_like(X)


def times_saved(ctx, g):
    return g * ctx.saved_tensors[0]


def times(x, factor):
    return factor * x, factor


SavedCosine = old_style("SavedCosine", lambda x: (x.sin(), x.cos()), times_saved)


class KeptOnContext(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.slope = 2 * x
        return x * x

    @staticmethod
    def backward(ctx, g):
        return g * ctx.slope


Detached = old_style("Detached", lambda x: (x * x, x), lambda ctx, g: 2 * g * ctx.saved_tensors[0].detach())
SlopeByNumPy = old_style(
    "SlopeByNumPy",
    lambda x: (x * x, x),
    lambda ctx, g: g * torch.from_numpy(2 * ctx.saved_tensors[0].detach().numpy()),
)


class Unrecorded(Detached):
    @staticmethod
    def backward(ctx, g):
        with torch.no_grad():
            return 2 * g * ctx.saved_tensors[0]


LOST = (SavedCosine, KeptOnContext, Detached, SlopeByNumPy)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("function", LOST)
@pytest.mark.parametrize("x", [X, ZERO], ids=["anywhere", "at zero"])
def test_detached_slope_is_rejected(function: Any, x: torch.Tensor) -> None:
    for f in (lambda x: function.apply(x).sum(), lambda x: function.apply(x).pow(2).sum() + x.pow(3).sum()):
        for derivative in (
            lambda f, x: hodiff.hvp(f, x, V),
            lambda f, x: hodiff.hessian_matrix(f, x),
            lambda f, x: hodiff.value_grad_hvp(f, x, V),
            lambda f, x: hodiff.HessianOperator(f, x) @ V,
        ):
            with pytest.raises(RouteError, match=rf"{function.__name__}\.backward \(test_lost_slopes\.py:\d+\)"):
                derivative(f, x)


def test_zero_slope_at_the_point_is_rejected_if_it_is_not_constant() -> None:
    with pytest.raises(RouteError, match=r"Unrecorded\.backward"):
        hodiff.hvp(lambda x: Unrecorded.apply(x).sum(), ZERO, V)


def test_detached_slope_in_float32_is_rejected() -> None:
    with pytest.raises(RouteError, match=r"SavedCosine\.backward"):
        hodiff.hvp(lambda x: SavedCosine.apply(x).sum(), X.float(), V.float())


def test_first_derivatives_are_allowed() -> None:
    torch.testing.assert_close(hodiff.JacobianOperator(SavedCosine.apply, X) @ V, X.cos())


def test_elementwise_derivative_under_no_grad_is_rejected() -> None:
    @torch.no_grad()
    def slope(x, y):
        return 2 * x

    square = hodiff.elementwise(lambda x: x * x, derivative=slope)
    with pytest.raises(RouteError, match="takes its slope for a constant"):
        hodiff.hvp(lambda x: square(x).sum(), X, V)


class SavedFactor(torch.autograd.Function):
    """exp(a b), whose backward uses its arguments and the saved output, which is detached."""

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


class Recomputed(SavedFactor):
    """exp(a b), whose backward uses the saved output only if backward is not differentiated."""

    @staticmethod
    def backward(ctx, g):
        a, b, value = ctx.saved_tensors
        value = (a * b).exp() if torch.is_grad_enabled() else value
        return g * b * value, g * a * value


class Completed(SavedFactor):
    """exp(a b), whose backward adds the derivative of a recomputed exponential to the saved output."""

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


@pytest.mark.parametrize("function", [SavedFactor, FactorOnContext])
def test_partly_detached_slope_is_rejected(function: Any) -> None:
    for _ in range(2):
        with pytest.raises(RouteError, match=rf"{function.__name__}\.backward .* a part of its slope for a constant"):
            hodiff.hvp(_by_factor(function), X, V)


def test_partly_detached_slope_under_saved_tensor_hooks_is_rejected() -> None:
    def f(x):
        with torch.autograd.graph.save_on_cpu():
            return _by_factor(SavedFactor)(x)

    with pytest.raises(RouteError, match="a part of its slope for a constant"):
        hodiff.hvp(f, X, V)


CHECKPOINTS = {
    "reentrant": partial(torch.utils.checkpoint.checkpoint, use_reentrant=True),
    "non-reentrant": partial(torch.utils.checkpoint.checkpoint, use_reentrant=False),
    "hodiff's": hodiff.functions.checkpoint,
    "nested": lambda f, x: hodiff.functions.checkpoint(lambda x: hodiff.functions.checkpoint(f, x), x),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("checkpoint", CHECKPOINTS.values(), ids=CHECKPOINTS)
@pytest.mark.parametrize("function", [SavedCosine, KeptOnContext, Detached, SavedFactor])
def test_detached_slope_inside_a_checkpoint_is_rejected(function: Any, checkpoint: Any) -> None:
    def block(x):
        return (function.apply(x, x.cos()) if issubclass(function, SavedFactor) else function.apply(x)).square()

    for derivative in (hodiff.hessian_matrix, lambda f, x: hodiff.hvp(f, x, V)):
        with pytest.raises(RouteError, match=rf"{function.__name__}\.backward \(test_lost_slopes\.py:\d+\)"):
            derivative(lambda x: checkpoint(block, x).sum(), X)


@pytest.mark.parametrize("name", sorted({*CHECKPOINTS} - {"nested"}))  # two nested checkpoints have two schedules
def test_right_function_inside_a_checkpoint_is_checked_less_and_less_often(name: str) -> None:
    calls = itertools.count()  # a checkpoint would restore a plain number

    def block(x):
        next(calls)
        return Recomputed.apply(x, x.cos()).square()

    # A new name makes the code new to hodiff, which checks known code less often.
    block.__code__ = block.__code__.replace(co_name=f"block of {name}")
    counts = []
    for _ in range(8):
        before = next(calls)
        torch.testing.assert_close(hodiff.hvp(lambda x: CHECKPOINTS[name](block, x).sum(), X, V), _true_product())
        counts.append(next(calls) - before)
    assert [each > min(counts) for each in counts] == [True, True, False, True, False, False, False, True]


@pytest.mark.parametrize("function", [Recomputed, Completed])
def test_saved_factors_that_lose_nothing_are_allowed(function: Any) -> None:
    torch.testing.assert_close(hodiff.hvp(_by_factor(function), X, V), _true_product())


def test_detached_factor_beside_a_constant_argument_is_rejected() -> None:
    """`WithMask` saves two constants; only one of them is an argument."""
    f = _by_factor(WithMask, torch.ones_like(X))
    for derivative in (lambda: hodiff.hvp(f, X, V), lambda: hodiff.HessianOperator(f, X) @ V):
        with pytest.raises(RouteError, match="a part of its slope for a constant"):
            derivative()


# Binary cross-entropy, whose forward computes the gradient, as fused losses do
KeptGradient = old_style(
    "KeptGradient",
    lambda x, target: (torch.nn.functional.softplus(x) - x * target, x.sigmoid() - target),
    lambda ctx, g: (times_saved(ctx, g), None),
)


def _slopes_of_gate(ctx, g):
    gate, y = ctx.saved_tensors
    return g * gate * (1 - gate) * y, g * gate


# sigmoid(x) y, which saves the sigmoid and the constant y
KeptGate = old_style("KeptGate", lambda x, y: (x.sigmoid() * y, x.sigmoid(), y), _slopes_of_gate)


class ByConstant(torch.autograd.Function):
    """x exp(y), whose backward is linear in x, so the factor exp(y) is constant if y is not differentiated."""

    @staticmethod
    def forward(ctx, x, y, count):
        ctx.save_for_backward(y.exp())
        count += 1
        return x * y.exp()

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0], None, None


@pytest.mark.parametrize("function", [KeptGradient, KeptGate])
@pytest.mark.parametrize("outer", [torch.sum, lambda y: y.square().sum()])
def test_result_kept_by_forward_beside_constant_arguments_is_rejected(function: Any, outer: Any) -> None:
    with pytest.raises(RouteError, match=rf"{function.__name__}\.backward"):
        hodiff.hvp(lambda x: outer(function.apply(x.tanh(), 3 * V)), X, V)


@pytest.mark.parametrize("y", [lambda x: V, lambda x: x.detach(), lambda x: W])
def test_factor_that_depends_on_constants_only_is_allowed(y: Any) -> None:
    count = torch.zeros(1)

    def f(x):
        return ByConstant.apply(x.tanh(), y(x), count).square().sum()

    tanh = X.tanh()
    slope = 1 - tanh**2
    truth = 2 * y(X).exp() ** 2 * (slope**2 - 2 * tanh**2 * slope)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # Of a detached tensor, hodiff tells that the gradient is not the derivative.
        warnings.filterwarnings("ignore", "hvp: the gradient by autograd is not the derivative of the function")
        torch.testing.assert_close(hodiff.hvp(f, X, V), truth)
    before = count.clone()
    f(X)
    assert torch.equal(count, before + 1)


def test_active_profiler_is_left_alone() -> None:
    profiler = cProfile.Profile()
    profiler.enable()
    hodiff.hvp(lambda x: ByConstant.apply(x, V, torch.zeros(1)).square().sum(), X, V)
    # From Python 3.12 on, cProfile uses sys.monitoring.
    assert sys.getprofile() is (profiler if sys.version_info < (3, 12) else None)
    profiler.disable()
    assert sys.getprofile() is None


class TwoOutputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.value = x.exp()
        return 2 * ctx.value, x.sin()

    @staticmethod
    def backward(ctx, g, other):
        return 2 * g * ctx.value + other * ctx.value


def test_detached_slope_of_one_of_several_outputs_is_rejected() -> None:
    for f in (lambda x: TwoOutputs.apply(x)[0].sum(), lambda x: TwoOutputs.apply(x)[0].square().sum()):
        with pytest.raises(RouteError, match=r"TwoOutputs\.backward"):
            hodiff.hvp(f, X, V)


def _without_grad(f: Any) -> Any:
    with torch.no_grad():
        return f()


# Backward passes of x^2 w that detach a part of the derivative, in helpers that their own code does not name
CUT_PARTS = {
    "an argument": lambda g, x, w: (2 * x * w.detach() * g, x * x * g),
    "an argument of the other slope": lambda g, x, w: (2 * x * w * g, x * x.data * g),
    "no_grad": lambda g, x, w: (_without_grad(lambda: 2 * x) * w * g, x * x * g),
    "NumPy": lambda g, x, w: (torch.from_numpy(2 * x.detach().numpy()) * w * g, x * x * g),
    "a number": lambda g, x, w: (2 * x * torch.tensor(w.tolist(), dtype=w.dtype) * g, x * x * g),
    "the cotangent": lambda g, x, w: (2 * x * w * g.detach(), x * x * g),
    "a summand": lambda g, x, w: (2 * x * (0.9 * w + 0.1 * w.detach()) * g, x * x * g),
}


def _of_two(pull: Any, *, split: bool) -> Any:
    """Return a Function of x and w with the value x^2 w, with a context in forward or in setup_context."""

    class OfTwo(torch.autograd.Function):
        generate_vmap_rule = split

        @staticmethod
        def backward(ctx, g):
            return pull(g, *ctx.saved_tensors)

    def with_context(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * x * w

    if split:
        OfTwo.forward = staticmethod(lambda x, w: x * x * w)
        OfTwo.setup_context = staticmethod(lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
    else:
        OfTwo.forward = staticmethod(with_context)
    return OfTwo


def _correct_backward(g, x, w):
    return 2 * x * w * g, x * x * g


W = torch.tensor([0.7, 0.4], dtype=torch.float64)
HESSIAN = torch.stack([  # for the sum of x^4 w^2
    torch.cat([torch.diag(12 * X**2 * W**2), torch.diag(8 * X**3 * W)], 1),
    torch.cat([torch.diag(8 * X**3 * W), torch.diag(2 * X**4)], 1),
]).flatten(0, 1)


def _penalty(f: Any) -> torch.Tensor:
    x = X.clone().requires_grad_()
    with hodiff.corrected():
        (slope,) = torch.autograd.grad(f(x), x, create_graph=True)
        return torch.autograd.grad(slope.sum(), x)[0]


def _by_transforms(f: Any) -> torch.Tensor:
    with hodiff.corrected():
        return torch.func.jacrev(torch.func.grad(f))(X).sum(0)


def _adapted(f: Any) -> torch.Tensor:
    x = X.clone().requires_grad_()
    adapted = hodiff.meta.adapt(lambda x, _: f(x), x, torch.zeros(1), hodiff.meta.SGD(0.1), steps=1)
    return (V - torch.autograd.grad(adapted.sum(), x)[0]) / 0.1


def _of_sophia(f: Any) -> torch.Tensor:
    x = torch.nn.Parameter(X.clone())
    optimizer = hodiff.optim.SophiaH([x], lr=1.0)
    f(x).backward()
    optimizer.step()
    return x


# Products of a diagonal Hessian with ones, and computations that need such products
ELSEWHERE = {
    "hvp": (False, lambda f: hodiff.hvp(f, X, V)),
    "operator": (False, lambda f: hodiff.HessianOperator(f, X) @ V),
    "corrected()": (False, _penalty),
    "adapt": (False, _adapted),
    "vmap": (True, lambda f: torch.vmap(lambda x: hodiff.hvp(f, x, V))(X[None])[0]),
    "transforms": (True, _by_transforms),
    "inside": (True, lambda f: hodiff.jacobian(torch.func.grad(f))(X).sum(0)),
    "Taylor mode": (True, lambda f: hodiff.taylor.pure_second_derivatives(f)(X)),
}


@pytest.mark.parametrize("cut", CUT_PARTS)
def test_slope_detached_from_one_argument_is_rejected(cut: str) -> None:
    function = _of_two(CUT_PARTS[cut], split=False)

    def f(point):
        return function.apply(point["x"], point["w"]).square().sum()

    point = {"x": X, "w": W}
    for derivative in (hodiff.hessian_matrix, lambda f, x: hodiff.hvp(f, x, x)):
        with pytest.raises(RouteError, match=r"OfTwo\.backward \(test_lost_slopes\.py:\d+\)"):
            derivative(f, point)


def test_saved_arguments_that_lose_nothing_are_allowed() -> None:
    function = _of_two(_correct_backward, split=False)
    found = hodiff.hessian_matrix(lambda p: function.apply(p["x"], p["w"]).square().sum(), {"x": X, "w": W})
    torch.testing.assert_close(found, HESSIAN)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("where", ELSEWHERE)
def test_partly_detached_slope_is_rejected_by_every_derivative(where: str) -> None:
    split, derivative = ELSEWHERE[where]
    u = X * X * X.cos()
    first = 2 * X * X.cos() - X * X * X.sin()
    second = 2 * X.cos() - 4 * X * X.sin() - X * X * X.cos()
    right = _of_two(_correct_backward, split=split)
    torch.testing.assert_close(
        derivative(lambda x: right.apply(x, x.cos()).square().sum()), 2 * (first**2 + u * second)
    )
    wrong = _of_two(CUT_PARTS["an argument"], split=split)
    with pytest.raises(RouteError, match=r"OfTwo\.backward"):
        derivative(lambda x: wrong.apply(x, x.cos()).square().sum())


def test_sophia_rejects_detached_slope() -> None:
    with pytest.raises(RouteError, match=r"SophiaH: .*Detached\.backward"):
        _of_sophia(lambda x: Detached.apply(x).sum())


def _run_in_an_optimizer_step(kind: Any, function: Any, *, backward: bool = False) -> None:
    x = torch.nn.Parameter(X.clone())
    optimizer = kind([x], lr=0.1)

    def closure() -> torch.Tensor:
        loss = function.apply(x).square().sum()
        if backward:
            optimizer.zero_grad()
            loss.backward()
        return loss

    optimizer.step(closure)


@pytest.mark.parametrize("kind", [hodiff.optim.AdaHessian, hodiff.optim.SophiaH, hodiff.optim.NewtonCG])
def test_steps_with_a_closure_reject_slope_kept_by_forward(kind: Any) -> None:
    with pytest.raises(RouteError, match=rf"{kind.__name__}: .*SavedCosine\.backward"):
        _run_in_an_optimizer_step(kind, SavedCosine)
    _run_in_an_optimizer_step(kind, Masked)


def test_closures_that_call_backward_reject_slope_kept_by_forward() -> None:
    with pytest.raises(RouteError, match=r"AdaHessian: .*SavedCosine\.backward"):
        _run_in_an_optimizer_step(hodiff.optim.AdaHessian, SavedCosine, backward=True)
    _run_in_an_optimizer_step(hodiff.optim.AdaHessian, Masked, backward=True)


SquaredByTransforms = custom(
    "SquaredByTransforms",
    lambda x, scale: scale * x**2,
    lambda ctx, g: (2 * g * ctx.saved_tensors[1] * ctx.saved_tensors[0], None),
)


@pytest.mark.parametrize("kind", [hodiff.optim.AdaHessian, hodiff.optim.SophiaH, hodiff.optim.NewtonCG])
def test_closures_that_call_transforms_are_supported(kind: Any) -> None:
    x = torch.nn.Parameter(X.clone())

    def penalty() -> torch.Tensor:
        slope = torch.func.grad(lambda x: SquaredByTransforms.apply(x, V).sum())(x)
        return slope.square().sum()

    kind([x], lr=0.1).step(penalty)
    assert (x.detach() - X).sign().tolist() == (-X).sign().tolist()


def exponential(z):
    return z.exp() + z**3, z, z.detach().exp()


KeptExponential = old_style(
    "KeptExponential", exponential, lambda ctx, g: g * (ctx.saved_tensors[1] + 3 * ctx.saved_tensors[0] ** 2).conj()
)
Exponential = old_style(
    "Exponential", exponential, lambda ctx, g: g * (ctx.saved_tensors[0].exp() + 3 * ctx.saved_tensors[0] ** 2).conj()
)


# ((x + 1e8) - 1e8)², whose gradient is rounded to multiples of 3e-8, the size of the steps of differences
Shifted = old_style(
    "Shifted",
    lambda x: (((x + 1e8) - 1e8) ** 2, x),
    lambda ctx, g: 2 * ((ctx.saved_tensors[0] + 1e8) - 1e8) * g,
)


@pytest.mark.parametrize("seed", range(8))
def test_cancellation_in_backward_is_not_taken_for_a_detached_slope(seed: int) -> None:
    x = torch.randn(3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    assert hodiff.hvp(lambda x: Shifted.apply(x).sum(), x, torch.ones_like(x)).tolist() == [2, 2, 2]


def test_complex_function_with_kept_slope_is_rejected() -> None:
    z, v = torch.complex(X, X.flip(0)), torch.complex(X.flip(0), X)
    with pytest.raises(RouteError, match=r"KeptExponential\.backward"):
        hodiff.hvp(lambda z: KeptExponential.apply(z).abs().square().sum(), z, v)
    expected = hodiff.hvp(lambda z: (z.exp() + z**3).abs().square().sum(), z, v)
    torch.testing.assert_close(hodiff.hvp(lambda z: Exponential.apply(z).abs().square().sum(), z, v), expected)


@pytest.mark.parametrize(
    "jacobian", [lambda f, x: hodiff.sparse.jacobian(f)(x).to_dense(), lambda f, x: hodiff.jacobian(f)(x)]
)
def test_differentiated_jacobians_reject_detached_slope(jacobian: Any) -> None:
    x = X.clone().requires_grad_()
    for function in (SavedCosine, Unrecorded):
        assert jacobian(function.apply, X).diagonal().abs().sum() > 0
        with pytest.raises(RouteError, match=rf"{function.__name__}\.backward"):
            jacobian(function.apply, x)
    rows = jacobian(lambda x: Masked.apply(x).square(), x)
    torch.testing.assert_close(torch.autograd.grad(rows.sum(), x)[0], 2 * (X > 0).to(X))


def test_adapt_rejects_slope_kept_by_forward() -> None:
    with pytest.raises(RouteError, match=r"adapt: SavedCosine\.backward"):
        _adapted(lambda x: SavedCosine.apply(x).sum())


Masked = old_style("Masked", lambda x: (x.relu(), (x > 0).to(x)), times_saved)


Weighted = old_style("Weighted", lambda x: times(x, torch.arange(x.numel()).to(x)), times_saved)


Dropout = old_style("Dropout", lambda x: times(x, 2 * (torch.rand_like(x) > 0.5).to(x)), times_saved)


# x times random numbers that do not depend on a seed, and x times a tensor that the caller may detach
Noise = old_style("Noise", lambda x: times(x, torch.tensor(list(os.urandom(x.numel()))).to(x)), times_saved)
Scaled = old_style("Scaled", times, lambda ctx, g: (times_saved(ctx, g), None))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("function", [Masked, Weighted, Dropout, Noise, lambda x: Scaled.apply(x, x.exp().detach())])
def test_piecewise_linear_functions_have_zero_hessian(function: Any, dtype: torch.dtype) -> None:
    apply = getattr(function, "apply", function)
    x = torch.linspace(-1, 1, 5000, dtype=dtype)
    state = torch.get_rng_state()
    assert not hodiff.hvp(lambda x: apply(x).sum(), x, x).any()
    torch.set_rng_state(state)
    # Only the user's own evaluation advances the generator.
    apply(x)
    after = torch.get_rng_state()
    torch.set_rng_state(state)
    hodiff.hvp(lambda x: apply(x).sum(), x, x)
    assert torch.equal(torch.get_rng_state(), after)


def test_function_is_checked_less_and_less_often() -> None:
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


def test_function_that_rejects_other_points_is_not_checked() -> None:
    def f(x):
        if not torch.equal(x.detach(), X):
            raise ValueError("only there")
        return Weighted.apply(x).pow(2).sum()

    torch.testing.assert_close(hodiff.hvp(f, X, V), torch.tensor([0.0, 2.0], dtype=torch.float64))


# |x|, whose derivative jumps at 0 and is defined as 0 there, the mean of both sides
Absolute = old_style("Absolute", lambda x: (x.abs(), x), lambda ctx, g: g * ctx.saved_tensors[0].sign())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_slope_that_jumps_at_the_point_counts_as_constant(dtype: torch.dtype) -> None:
    x = torch.tensor([0.0, 0.0], dtype=dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hodiff.HodiffWarning)
        assert not hodiff.hvp(lambda x: Absolute.apply(x).sum(), x, torch.ones_like(x)).any()


class Split(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def backward(ctx, g, *_):
        return g * ctx.saved_tensors[0]


class ComputedBeside(Split):
    @staticmethod
    def forward(x):
        return x.sin()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0].cos())


class ReturnedBeside(Split):
    @staticmethod
    def forward(x):
        return x.sin(), x.cos()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])


def _sine(function: Any, x: torch.Tensor) -> torch.Tensor:
    found = function.apply(x)
    return found[0] if isinstance(found, tuple) else found


@pytest.mark.parametrize("function", [ComputedBeside, ReturnedBeside])
@pytest.mark.parametrize(
    "derivative",
    [
        lambda f: torch.func.jacrev(torch.func.grad(f))(X),
        lambda f: torch.func.grad(lambda x: torch.func.grad(f)(x).sum())(X),
        lambda f: torch.vmap(torch.func.jacrev(torch.func.grad(f)))(torch.stack([X, V])),
        lambda f: torch.func.grad(lambda x: torch.vmap(torch.func.grad(f))(torch.stack([x, V])).sum())(X),
        lambda f: hodiff.laplacian(f)(X),
        lambda f: hodiff.jacobian(torch.func.grad(f))(X),
    ],
)
def test_slope_kept_by_forward_is_rejected_inside_transforms(function: Any, derivative: Any) -> None:
    with hodiff.corrected(), pytest.raises(RouteError, match=rf"{function.__name__}"):
        derivative(lambda x: _sine(function, x).square().sum())


class SplitMask(Split):
    """x times random numbers or a given factor, so the derivative is constant."""

    @staticmethod
    def forward(x, factor):
        mask = torch.rand_like(x) if factor is None else 1 * factor
        return x * mask, mask

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx, g, *_):
        return g * ctx.saved_tensors[0], None


@pytest.mark.parametrize("factor", [None, 3 * V])
def test_constant_kept_by_forward_is_allowed_inside_transforms(factor: Any) -> None:
    def f(x):
        torch.manual_seed(0)
        y, mask = SplitMask.apply(x, factor)
        return (y * y).sum(), mask

    with hodiff.corrected():
        slope = torch.func.jacrev(torch.func.grad(f, has_aux=True), has_aux=True)
        found, mask = slope(X)
        torch.testing.assert_close(found, torch.diag(2 * mask**2))


def _function_that_keeps(keep: Any) -> Any:
    """Return a Function of sin(x) + x^3 that keeps part of its slope on its context, in the given form."""

    class Keeping(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, scale=1.0):
            ctx.save_for_backward(x)
            ctx.kept = keep(x.detach().cos())
            return scale * (x.sin() + x**3)

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            kept = torch.as_tensor(ctx.kept[0], dtype=x.dtype)
            return g * (kept + 3 * x**2), *[None] * (len(ctx.needs_input_grad) - 1)

    return Keeping


KEEPING = {
    "a list of tensors": lambda slope: [slope],
    "an array": lambda slope: [slope.numpy()],
    "numbers": lambda slope: (slope.tolist(),),
    "a dict": lambda slope: {0: slope},
    "float32": lambda slope: [slope.float()],
    "an array of float32": lambda slope: [slope.float().numpy()],
    "float16": lambda slope: [slope.half()],
    "bfloat16": lambda slope: [slope.bfloat16()],
    "a part of complex numbers": lambda slope: (torch.complex(slope, slope).real,),
}


@pytest.mark.parametrize("keep", KEEPING.values(), ids=KEEPING)
def test_slope_kept_in_a_container_is_rejected(keep: Any) -> None:
    function = _function_that_keeps(keep)
    with pytest.raises(RouteError, match=r"Keeping\.backward"):
        hodiff.hvp(lambda x: function.apply(x).sum(), X, V)


# 100 x^3 + sin(x), which saves the slope of the sine
KeptInPart = old_style(
    "KeptInPart",
    lambda x: (100 * x**3 + x.sin(), x, x.cos()),
    lambda ctx, g: g * (300 * ctx.saved_tensors[0] ** 2 + ctx.saved_tensors[1]),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_small_detached_part_of_a_slope_is_rejected(dtype: torch.dtype) -> None:
    """The lost part is 0.93 of a curvature of -719."""
    with pytest.raises(RouteError, match=r"KeptInPart\.backward"):
        hodiff.hvp(lambda x: KeptInPart.apply(x).sum(), X.to(dtype), V.to(dtype))


def _any_place() -> Any:
    class AnyPlace(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, loses):
            ctx.save_for_backward(x)
            ctx.loses = loses
            return x.sin() + x**2

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return g * ((x.detach() if ctx.loses else x).cos() + 2 * x), None

    return AnyPlace


@pytest.mark.parametrize("place", range(6))
def test_every_call_in_a_loop_is_checked(place: int) -> None:
    function = _any_place()

    def f(x):
        for i in range(6):
            x = function.apply(x, i == place) / 2
        return x.sum()

    with pytest.raises(RouteError, match=r"AnyPlace\.backward"):
        hodiff.hvp(f, X, V)


def _exact(function: Any, slope: Any) -> Any:
    return old_style("Exact", lambda x: (function(x), x), lambda ctx, g: g * slope(*ctx.saved_tensors))


EXACT = {
    "waves": (torch.sin, torch.cos, [torch.tensor(float(n)) for n in range(500, 2000, 60)]),
    "a wave on a slope": (lambda x: 1000 * x + x.sin(), lambda x: 1000 + x.cos(), list(torch.linspace(-2, 2, 20))),
    "a narrow bell": (
        lambda x: torch.exp(-((x / 2e-3) ** 2) / 2),
        lambda x: -x / 4e-6 * torch.exp(-((x / 2e-3) ** 2) / 2),
        [torch.linspace(0, 1e-4, 10), torch.tensor(0.0)],
    ),
    "a curvature below all numbers": (torch.log, torch.reciprocal, [torch.tensor(1e200, dtype=torch.float64)]),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", EXACT)
@pytest.mark.filterwarnings("ignore::hodiff.HodiffWarning")
def test_right_slopes_with_inaccurate_differences_are_allowed(name: str) -> None:
    function, slope, points = EXACT[name]
    for x in points:
        exact = _exact(function, slope)  # a new class, which has not been checked before
        found = hodiff.hvp(lambda x, exact=exact: exact.apply(x).sum(), x, torch.ones_like(x))
        torch.testing.assert_close(found, hodiff.hvp(lambda x: function(x).sum(), x, torch.ones_like(x)))


# Returns tanh(x) and its slope; backward ignores the cotangent of the slope
def _slope_of_tanh(x):
    slope = 1 - x.tanh() ** 2
    return (x.tanh(), slope), slope


WithSlope = old_style("WithSlope", _slope_of_tanh, lambda ctx, g, _: times_saved(ctx, g))


def test_detached_slope_returned_as_unused_output_is_rejected() -> None:
    with pytest.raises(RouteError, match=r"WithSlope\.backward"):
        hodiff.hvp(lambda x: WithSlope.apply(x)[0].sum(), X, V)


class Averaged(torch.autograd.Function):
    """Updates a buffer of the module and draws from the generator that it is given."""

    @staticmethod
    def forward(ctx, x, module, generator):
        module.mean.mul_(0.9).add_(x.detach(), alpha=0.1)
        ctx.save_for_backward(x, torch.rand(x.shape, generator=generator).to(x))
        return ctx.to_save[1] * x**3

    @staticmethod
    def backward(ctx, g):
        x, factor = ctx.saved_tensors
        return 3 * g * factor * x**2, None, None


def test_step_updates_buffers_and_generators_once() -> None:
    module = torch.nn.Module()
    module.register_buffer("mean", torch.zeros_like(X))
    x, generator = torch.nn.Parameter(X.clone()), torch.Generator().manual_seed(0)
    hodiff.optim.AdaHessian([x]).step(lambda: Averaged.apply(x, module, generator).sum())
    torch.testing.assert_close(module.mean, 0.1 * X)
    expected = torch.Generator().manual_seed(0)
    torch.rand(X.shape, generator=expected)
    assert torch.equal(torch.rand(3, generator=generator), torch.rand(3, generator=expected))


class Remembered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, holder):
        ctx.save_for_backward(x, torch.ones_like(x))
        return x.sin()

    @staticmethod
    def backward(ctx, g):
        x, one = ctx.saved_tensors
        return g * one * x.cos(), None


@pytest.mark.slow
def test_step_leaves_no_graph_behind() -> None:
    x, held = torch.nn.Parameter(X.clone()), []

    def closure() -> torch.Tensor:
        holder = torch.nn.Module()
        holder.result = Remembered.apply(x, holder)
        held.append(weakref.ref(holder))
        return holder.result.square().sum()

    optimizer = hodiff.optim.NewtonCG([x])
    for _ in range(3):
        optimizer.step(closure)
    gc.collect()
    assert [each() for each in held] == [None] * 3


def test_callable_objects_are_checked_less_and_less_often() -> None:
    counted = 0

    class Counted(Remembered):
        @staticmethod
        def forward(ctx, x, holder):
            nonlocal counted
            counted += 1
            return Remembered.forward(ctx, x, holder)

    f = partial(lambda x, scale: scale * Counted.apply(x, None).sum(), scale=2.0)
    for _ in range(8):
        hodiff.hvp(f, X, V)
    counted = 0
    hodiff.hvp(f, X, V)
    assert counted == 1
