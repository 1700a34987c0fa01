"""Inner loops, implicit functions and estimates inside functions of jets are correct, or refused as in `hodiff.hvp`."""

import functools
import threading
from types import SimpleNamespace

import pytest
import torch
from drawing import normals, seeded
from mpmath_series import D
from taylor.nested import assert_all
from torch import nn

import hodiff
from hodiff import InputError, RouteError, estimators, meta
from hodiff.implicit import argmin, fixed_point, linear_solve, picard, root
from hodiff.meta import SGD, Adam, adapt
from hodiff.operators import MatrixOperator
from hodiff.taylor import jet

randn = normals(seeded())

X, ONES = 0.4 * randn(3), torch.ones(3, dtype=D)
TERMS = [randn(3), randn(3), randn(3)]


def square(q, b):
    return ((q - b) ** 2).sum()


def by_gradient_descent(q, b, rate=0.1, steps=3):
    """Run gradient descent on `square`, explicitly."""
    for _ in range(steps):
        q = q - 2 * rate * (q - b)
    return q


def descended_on_quartic(q, b, steps=3):
    for _ in range(steps):
        q = q - 0.1 * 4 * (q - b) ** 3
    return q


LOOPS = {
    "loss": (
        lambda w: adapt(lambda q, _: square(q, w), ONES, None, SGD(0.1), 3),
        lambda w: by_gradient_descent(ONES, w),
    ),
    "quartic loss": (
        lambda w: adapt(lambda q, _: ((q - w) ** 4).sum(), ONES, None, SGD(0.1), 3),
        lambda w: descended_on_quartic(ONES, w),
    ),
    "loss of an object": (
        lambda w: adapt(
            functools.partial(lambda held, q, _: square(q, held.w), SimpleNamespace(w=w)), ONES, None, SGD(0.1), 3
        ),
        lambda w: by_gradient_descent(ONES, w),
    ),
    "batch": (lambda w: adapt(square, ONES, w, SGD(0.1), 3), lambda w: by_gradient_descent(ONES, w)),
    "batches": (
        lambda w: adapt(square, ONES, lambda step: w * step, SGD(0.1), 3),
        lambda w: by_gradient_descent(
            by_gradient_descent(by_gradient_descent(ONES, 0 * w, steps=1), w, steps=1), 2 * w, steps=1
        ),
    ),
    "rate": (
        lambda w: adapt(square, ONES, 2 * ONES, SGD(w.exp().sum() / 50), 3),
        lambda w: by_gradient_descent(ONES, 2 * ONES, w.exp().sum() / 50),
    ),
    "start": (lambda w: adapt(square, w * w, ONES, SGD(0.1), 3), lambda w: by_gradient_descent(w * w, ONES)),
    "start and loss": (
        lambda w: adapt(lambda q, _: ((q - w) ** 4).sum(), w * w, None, SGD(0.1), 3),
        lambda w: descended_on_quartic(w * w, w),
    ),
    "clip": (
        lambda w: adapt(square, ONES, w, SGD(0.1), 1, clip=1.0),
        lambda w: ONES - 0.1 * 2 * (ONES - w) / ((4 * (ONES - w).square().sum()).sqrt() + 1e-6),
    ),
    "checkpoint": (
        lambda w: adapt(lambda q, _: square(q, w), ONES, None, SGD(0.1), 3, checkpoint=2),
        lambda w: by_gradient_descent(ONES, w),
    ),
    "forward-over-reverse": (
        lambda w: adapt(lambda q, _: square(q, w), ONES, None, SGD(0.1), 3, route="forward-over-reverse"),
        lambda w: by_gradient_descent(ONES, w),
    ),
    "truncate": (
        lambda w: adapt(lambda q, _: square(q, w), ONES, None, SGD(0.1), 3, truncate=1),
        lambda w: by_gradient_descent(by_gradient_descent(ONES, w.detach(), steps=2), w, steps=1),
    ),
    "no steps": (lambda w: w + adapt(lambda q, _: square(q, w), ONES, None, SGD(0.1), 0), lambda w: w + ONES),
}


@pytest.mark.one_in(13)
@pytest.mark.parametrize("name", LOOPS)
def test_inner_loop_matches_explicit_loop(name):
    """Series to order 3, and collapsed, match the explicit loop."""
    assert_all(*LOOPS[name], X, TERMS)


def test_inner_loop_derivatives_match_closed_form():
    w, one = torch.tensor(1.0, dtype=D), torch.ones((), dtype=D)
    for steps, first, second in ((1, 0.4, 0.08), (2, 0.72, 0.2592), (3, 0.976, 0.476288)):
        f = lambda w, steps=steps: adapt(lambda q, _: (q - w) ** 2, one, None, SGD(0.1), steps) ** 2  # noqa: E731
        expected = torch.tensor([1, first, second], dtype=D)
        torch.testing.assert_close(torch.stack(hodiff.directional_derivatives(f, w, one, order=2)), expected)
        torch.testing.assert_close(hodiff.laplacian(f)(w), expected[2])
        torch.testing.assert_close(hodiff.hvp(f, w, one), expected[2])


def assert_as_hessian(f, x=X):
    """Compare derivatives along a curve and the Laplacian with reverse mode over reverse mode."""
    H, slope = hodiff.hessian_matrix(f, x), hodiff.jacobian(f)(x)
    v, a, _ = TERMS
    value, (first, second) = jet(f, (x,), ([v, a],))
    torch.testing.assert_close(value, f(x).detach())
    torch.testing.assert_close((first, second), (slope @ v, slope @ a + v @ H @ v), rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(hodiff.laplacian(f)(x), H.trace(), rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(hodiff.taylor.pure_second_derivatives(f)(x), H.diagonal(), rtol=1e-6, atol=1e-9)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("state", [False, True])
def test_optimizer_state_is_differentiated(state):
    def f(w):
        optimizer = Adam(0.1)
        given = optimizer.init(ONES) if state else None
        found = adapt(lambda q, _: ((q - w) ** 4).sum(), ONES, None, optimizer, 3, state=given, history=True)
        return found.params.square().sum() + found.losses.sum()

    assert_as_hessian(f)


def test_generator_draws_match_plain_tensors():
    def f(w):
        generator = torch.Generator().manual_seed(1)
        noisy = lambda q, _: ((q - w * (1 + 0.1 * torch.randn(3, dtype=D))) ** 4).sum()  # noqa: E731
        return adapt(noisy, ONES, None, SGD(0.1), 2, generator=generator).square().sum()

    assert_as_hessian(f)


def test_iterator_of_batches_is_rejected():
    f = lambda w: adapt(square, ONES, (w * i for i in range(3)), SGD(0.1), 3).sum()  # noqa: E731
    with pytest.raises(RouteError, match=r"adapt runs its function more than once .* iterator"):
        hodiff.laplacian(f)(X)


class Slope(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(X.clone())

    def forward(self, x):
        return torch.tanh(x @ self.w)


TASKS = tuple(randn(*shape) for shape in ((2, 4, 3), (2, 4), (2, 4, 3), (2, 4)))
LEARNERS = {
    "MAML": lambda loss: meta.MAML(Slope(), loss, lr=0.1, steps=2),
    "FOMAML": lambda loss: meta.FOMAML(Slope(), loss, lr=0.1, steps=2),
    "MetaSGD": lambda loss: meta.MetaSGD(Slope(), loss, lr=0.1, steps=2),
    "IMAML": lambda loss: meta.IMAML(Slope(), loss, lr=0.1, steps=200, strength=2.0, cg_tolerance=1e-12),
}


def mse(prediction, target):
    return (prediction - target).square().mean()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "IMAML" else ()) for name in LEARNERS]
)
def test_meta_objective_laplacian_by_parameters_matches(name):
    learner = LEARNERS[name](mse)
    assert_as_hessian(lambda w: torch.func.functional_call(learner, {"module.w": w}, (TASKS,)))


@pytest.mark.slow
def test_meta_objective_laplacian_by_closed_over_values_matches_or_raises():
    assert_as_hessian(lambda w: LEARNERS["MAML"](lambda p, t: w.square().sum() * mse(p, t))(TASKS))
    for transform in (lambda f: hodiff.laplacian(f)(X), lambda f: jet(f, (X,), (TERMS,))):
        with pytest.raises(InputError, match=r"IMAML: .* closes over"):
            transform(lambda w: LEARNERS["IMAML"](lambda p, t: w.square().sum() * mse(p, t))(TASKS))


def test_hypergradient_is_rejected():
    def f(w):
        inner = lambda q, h: (square(q, w) + h * q**2).sum()  # noqa: E731
        return meta.hypergradient(lambda q, _: q.sum(), inner, ONES, ONES).value.sum()

    for transform in (lambda f: hodiff.laplacian(f)(X), lambda f: jet(f, (X,), (TERMS,))):
        with pytest.raises(RouteError):
            transform(f)


def heron(residual, x, p):
    for _ in range(40):
        x = x - residual(x, p) / (2 * x)
    return x


class Residual:
    def __init__(self, w):
        self.w = w

    def __call__(self, x, p):
        return x * x - self.w.exp().sum() * p


class Objective(Residual):
    def __call__(self, x, p):
        return ((x - p + self.w - X) ** 2).sum()


WORLD = {}
HIDDEN = threading.local()


def with_world(x, p):
    return x * x - WORLD["w"].exp().sum() * p


def of_world(w, p):
    WORLD["w"] = w
    return root(with_world, heron)(ONES, p)


def of_thread(w, p):
    HIDDEN.w = w
    return root(lambda x, p: x * x - HIDDEN.w.exp().sum() * p, heron)(ONES, p)


CAPTURED = {
    "root": lambda w, p: root(lambda x, p: x * x - w.exp().sum() * p, heron)(ONES, p),
    "object": lambda w, p: root(Residual(w), heron)(ONES, p),
    "partial": lambda w, p: root(functools.partial(lambda w, x, p: x * x - w.exp().sum() * p, w), heron)(ONES, p),
    "global": of_world,
    "thread": of_thread,
    "aux": lambda w, p: root(lambda x, p: (x * x - w.exp().sum() * p, x), heron, has_aux=True)(ONES, p)[0],
    "fixed_point": lambda w, p: fixed_point(lambda x, p: 0.5 * torch.cos(x) + w.sum() * p, picard())(ONES, p),
    "argmin": lambda w, p: argmin(lambda x, p: square(x, w.sum() * p), lambda f, x, p: x)(ONES, p),
    "argmin, solver": lambda w, p: argmin(square, lambda f, x, p: p + 0 * w.detach())(ONES, p),
    "argmin, object": lambda w, p: argmin(Objective(w), lambda f, x, p: p)(ONES, p),
    "linear_solve": lambda w, p: linear_solve(lambda x: w.exp().sum() * x, p),
    "linear_solve, method": lambda w, p: linear_solve(
        lambda x, p: (2 + p * p) * x, ONES, p, method=lambda A, b: b / (2 + (p * p).detach()) + 0 * w
    ),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("moving", [False, True], ids=["constant parameters", "moving parameters"])
@pytest.mark.parametrize("name", CAPTURED)
def test_implicit_function_rejects_closed_over_values(name, moving):
    def f(w):
        return CAPTURED[name](w, w.exp() if moving else ONES).sum()

    for transform in (
        lambda: hodiff.laplacian(f)(X),
        lambda: hodiff.laplacian(f, sparse=False)(X),
        lambda: hodiff.taylor.value_grad_laplacian(f)(X),
        lambda: hodiff.taylor.pure_second_derivatives(f)(X),
        lambda: hodiff.partial(f, (0, 1, 1))(X),
        lambda: hodiff.directional_derivatives(f, X, TERMS[0], order=2),
        lambda: jet(f, (X,), (TERMS,)),
        lambda: jet(lambda w: hodiff.hvp(lambda y: f(w) * y.square().sum(), X, X), (X,), (TERMS[:1],)),
    ):
        with pytest.raises(InputError, match="closes over"):
            transform()


@pytest.mark.slow
def test_implicit_function_accepts_closed_over_constants():
    """An implicit function may close over a detached value, a value that f creates, or any value under no_grad."""

    def of_detached(w):
        level = w.detach().exp().sum()
        return root(lambda x, p: x * x - level * p, heron)(ONES, w.exp())

    level = X.exp().sum()
    assert_all(of_detached, lambda w: (level * w.exp()).sqrt(), X, TERMS)

    def of_own(w):
        shift = torch.zeros(3, dtype=D)
        sums = torch.zeros(3, dtype=D)
        sums[0] = w.sum()
        return root(lambda x, p: x * x - p - shift, heron)(ONES, w.exp()) + sums

    unit = torch.tensor([1.0, 0, 0], dtype=D)
    assert_all(of_own, lambda w: w.exp().sqrt() + unit * w.sum(), X, TERMS)

    def switched_off(w):
        with torch.no_grad():
            found = CAPTURED["root"](w, ONES) + adapt(lambda q, _: square(q, w), ONES, None, SGD(0.1), 2)
        return found * w

    factor = switched_off(X) / X
    assert_all(switched_off, lambda w: factor * w, X, TERMS)


ESTIMATES = {
    "trace": lambda A, b: estimators.trace(A, method="exact").value,
    "logdet": lambda A, b: estimators.logdet(A).value,
    "eigsh": lambda A, b: estimators.eigsh(A, 1).eigenvalues,
    "solve": lambda A, b: estimators.solve(A, b).value,
}


@pytest.mark.parametrize("name", ESTIMATES)
def test_estimates_are_rejected(name):
    estimate, eye = ESTIMATES[name], torch.eye(3, dtype=D)
    for f in (
        lambda w: estimate(MatrixOperator(torch.diag(w.exp())), ONES) * w.sum(),
        lambda w: estimate(torch.diag(w.exp()), ONES) * w.sum(),
        lambda w: estimate(MatrixOperator(eye) * w.exp().sum(), ONES) * w.sum(),
    ):
        for transform in (lambda f: hodiff.laplacian(f)(X), lambda f: jet(f, (X,), (TERMS,))):
            with pytest.raises((InputError, RouteError)):
                transform(f)
    factor = estimate(MatrixOperator(2 * eye), ONES)
    constant = lambda w: (estimate(MatrixOperator(2 * eye), ONES) * w**2).sum()  # noqa: E731
    assert_all(constant, lambda w: (factor * w**2).sum(), X, TERMS)


def test_function_that_closes_over_a_value_is_rejected_inside_a_derivative():
    def times(w):
        class Times(torch.autograd.Function):
            @staticmethod
            def forward(y):
                return y.sin() * w

            @staticmethod
            def setup_context(ctx, inputs, output):
                ctx.save_for_backward(*inputs)
                ctx.save_for_forward(*inputs)

            @staticmethod
            def backward(ctx, cotangent):
                return cotangent * ctx.saved_tensors[0].cos() * w

            @staticmethod
            def jvp(ctx, tangent):
                return tangent * ctx.saved_tensors[0].cos() * w

        return Times.apply

    def f(w):
        return hodiff.hvp(lambda y: times(w)(y).square().sum(), ONES / 3, ONES)

    with pytest.raises(RouteError, match="forward of a Function closes over"):
        jet(f, (X,), (TERMS[:2],))
