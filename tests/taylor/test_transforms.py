"""Tests of jets inside gradients, batches, compilers, in-place writes and Functions, and of jets of jets."""

import threading

import pytest
import torch
from custom_functions import custom, old_style, squared_slope
from drawing import normals, seeded
from mpmath_series import D, derivatives, number
from torch.nn import functional

import hodiff
from hodiff.taylor import explain, jet, register
from hodiff.taylor.registry import RULES

randn = normals(seeded())

X, V = randn(3), randn(3)
ZERO = torch.zeros(3, dtype=D)


def cubic(x):
    return (x[0] * x[1] * x[2]).reshape(()) + x[0] ** 2


def cubic_along(x, v):
    """Return the coefficients of the cubic in t at x + t v."""
    (a, b, c), (d, e, f) = x, v
    first = d * b * c + a * e * c + a * b * f + 2 * a * d
    second = d * e * c + d * b * f + a * e * f + d * d
    return [a * b * c + a * a, first, second, d * e * f]


def assert_series(found, expected):
    value, terms = found
    for got, right in zip([value, *terms], derivatives(expected), strict=True):
        torch.testing.assert_close(got, right)


def test_jet_along_a_line_matches_closed_form():
    assert_series(jet(cubic, (X,), ([V, ZERO, ZERO],)), cubic_along(X, V))


def test_gradient_of_a_jet_matches():
    """The third coefficient is the product of the elements of v, and its gradient is the products of two elements."""

    def third(v):
        return jet(cubic, (X,), ([v, ZERO, ZERO],))[1][2]

    expected = 6 * torch.stack([V[1] * V[2], V[0] * V[2], V[0] * V[1]])
    torch.testing.assert_close(torch.func.grad(third)(V), expected)
    torch.testing.assert_close(torch.func.jvp(third, (V,), (V,))[1], 3 * 6 * V.prod())
    v = V.clone().requires_grad_()
    (found,) = torch.autograd.grad(third(v), v)
    torch.testing.assert_close(found, expected)


def test_vmap_of_jets_matches():
    X, V = randn(4, 3), randn(4, 3)
    value, terms = torch.func.vmap(lambda x, v: jet(cubic, (x,), ([v, 0 * v, 0 * v],)))(X, V)
    for i in range(4):
        assert_series((value[i], tuple(each[i] for each in terms)), cubic_along(X[i], V[i]))


def test_jet_of_a_jet_matches():
    """A jet of a jet is the mixed derivative by the two curve parameters."""
    W = randn(3)

    def inner(x):
        return jet(cubic, (x,), ([V, ZERO],))[1][1]

    # D² f(x)[V, V] moved along W is the third differential, to which only x0 x1 x2 contributes.
    (d, e, f), (p, q, r) = V, W
    expected = 2 * (d * e * r + d * f * q + e * f * p)
    torch.testing.assert_close(jet(inner, (X,), ([W],))[1][0], expected)


@pytest.mark.parametrize("order", [1, 3])
def test_gradients_inside_match(order):
    """The series of |∇f|² of a cubic along a line is correct, as in physics-informed networks."""

    def squared_slope(x):
        x.requires_grad_()
        (gradient,) = torch.autograd.grad(cubic(x), x, create_graph=True)
        return (gradient * gradient).sum()

    def written_out(x):
        g = torch.stack([x[1] * x[2] + 2 * x[0], x[0] * x[2], x[0] * x[1]])
        return (g * g).sum()

    terms = [V, *[ZERO] * (order - 1)]
    found, right = jet(squared_slope, (X,), (terms,)), jet(written_out, (X,), (terms,))
    torch.testing.assert_close(found, right)
    torch.testing.assert_close(hodiff.laplacian(squared_slope)(X), torch.trace(torch.func.hessian(written_out)(X)))
    assert not X.requires_grad


def test_in_place_writes_and_views_match():
    x = randn(5)

    def f(x):
        out = torch.zeros_like(x)
        out[1:3] = x[0:2] ** 2
        out[0].add_(x[4] * x[3])
        row = out.view(5)[3:]
        row.mul_(2).add_(x[:2])
        out[torch.tensor([0, 1])] *= x[2]
        return (out**2).sum() + out[3].sin()

    def written_out(x):
        return (x[4] * x[3] * x[2]) ** 2 + (x[0] ** 2 * x[2]) ** 2 + x[1] ** 4 + x[0] ** 2 + x[1] ** 2 + x[0].sin()

    torch.testing.assert_close(f(x), written_out(x))
    found = jet(f, (x,), ([randn(5) * 0 + 1, randn(5) * 0],))
    torch.testing.assert_close(found, jet(written_out, (x,), ([x * 0 + 1, x * 0],)))
    torch.testing.assert_close(hodiff.laplacian(f)(x), torch.trace(torch.func.hessian(written_out)(x)))


WRITTEN = {
    "relu": lambda x: functional.relu(x, inplace=True),
    "elu": lambda x: functional.elu(x, 1.0, True),
    "a module": torch.nn.LeakyReLU(0.1, inplace=True),
    "masked": lambda x: x.masked_fill_(torch.tensor([True, False, False, True]), 2.0),
    "copied": lambda x: x.copy_(x.flip(0)),
    "zeros": lambda x: x.zero_(),
    "filled": lambda x: x.fill_(2.0),
    "without a rule": lambda x: x.sinc_(),
    "added": lambda x: x.index_add_(0, torch.tensor([1, 1]), x[:2] ** 2),
    "added to a part": lambda x: x[1:3].add_(x[0]),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_in_place_operators_match_forward_mode(name):
    """In-place writes match torch's own forward mode, and do not change the caller's tensors."""
    x, v = torch.tensor([-1.0, 0.5, -2.0, 3.0], dtype=D), torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=D)
    kept = x.clone(), v.clone()

    def f(x):
        x = x * 1.5
        WRITTEN[name](x)
        return x * x

    value, (slope,) = jet(f, (x,), ([v],))
    with hodiff.corrected():
        expected = torch.func.jvp(f, (x,), (v,))
    torch.testing.assert_close((value, slope), expected)
    torch.testing.assert_close((x, v), kept)


def test_unsupported_writes_are_rejected():
    for f, words in (
        (lambda x: x.clone().unsqueeze_(0), "unsqueeze_ writes in place, which is not supported"),
        (lambda x: torch.sin(x, out=x.clone()), "out=: expected None"),
    ):
        with pytest.raises(hodiff.InputError, match=words):
            jet(f, (X,), ([V],))


COPIES = {
    "picked": lambda x: x[torch.tensor([0, 1])],
    "masked": lambda x: x[x > -100],
    "contiguous": lambda x: x.reshape(2, 2).mT.contiguous(),
    "reshaped": lambda x: x.reshape(2, 2).mT.reshape(4),
    "converted": lambda x: x.to(torch.float32),
    "cloned": lambda x: x.clone(),
    "flattened": lambda x: x.reshape(2, 2).mT.flatten(),
}
SHOWN = {
    "itself": lambda x: x.contiguous(),
    "shape": lambda x: x.reshape(2, 2),
    "part": lambda x: x[1:],
    "of a part": lambda x: x.view(2, 2)[0].unsqueeze(0),
    "one of several": lambda x: x.unbind()[2],
    "converted": lambda x: x.to(torch.float64),
}


@pytest.mark.parametrize("name", [*COPIES, *(f"{name}, shown" for name in SHOWN)])
def test_writes_to_copies_do_not_reach_the_original(name):
    take = SHOWN[name.removesuffix(", shown")] if name.endswith("shown") else COPIES[name]
    x = torch.arange(1.0, 5.0, dtype=D)

    def f(x):
        x = x * 1
        take(x).mul_(3)
        return x

    value, (slope,) = jet(f, (x,), ([torch.ones(4, dtype=D)],))
    torch.testing.assert_close(value, f(x))
    torch.testing.assert_close(slope, f(x) / x)


Square = custom("Square", lambda x: x * x, squared_slope, squared_slope)


# A Function whose rule is not the derivative of its forward
StraightThrough = custom("StraightThrough", lambda x: x.round(), lambda ctx, g: g, lambda ctx, tangent: tangent.clone())


BackwardAlone = custom("BackwardAlone", lambda x: x * x, squared_slope)


Legacy = old_style("Legacy", lambda x: (x * x,), lambda ctx, g: g)


@pytest.mark.parametrize("recording", [True, False])
@pytest.mark.parametrize("function", [Square, BackwardAlone])
def test_function_uses_its_rule(function, recording):
    square = function.apply
    with torch.set_grad_enabled(recording):
        found = jet(lambda x: square(x) * x, (number(1.3),), ([number(2.0), number(0.0), number(0.0)],))
    expected = [1.3**3, 3 * 1.3**2 * 2, 6 * 1.3 * 4, 6 * 8.0]
    torch.testing.assert_close(torch.stack([found[0], *found[1]]), torch.tensor(expected, dtype=D))


def test_custom_rule_is_followed_even_if_it_is_no_derivative():
    found = jet(lambda x: StraightThrough.apply(x) * x, (number(1.2),), ([number(1.0), number(0.0)],))
    torch.testing.assert_close(torch.stack(found[1]), torch.tensor([2.2, 2.0], dtype=D))
    with torch.inference_mode():
        again = jet(lambda x: StraightThrough.apply(x) * x, (number(1.2),), ([number(1.0), number(0.0)],))
    torch.testing.assert_close(again[1], found[1])


def test_function_without_setup_context_is_rejected():
    # Since torch 2.15, the name of the Function is unknown.
    with pytest.raises(
        hodiff.RouteError, match=r"(Legacy|a Function): expected an autograd\.Function with setup_context"
    ):
        jet(Legacy.apply, (X,), ([V],))


def test_registered_rule_replaces_the_function():
    @register(StraightThrough)
    def square(x):
        return x * x

    try:
        found = jet(StraightThrough.apply, (X,), ([V, ZERO],))
    finally:
        del RULES[StraightThrough]
    torch.testing.assert_close(found[1], (2 * X * V, 2 * V * V))
    with pytest.raises(hodiff.InputError, match="register: functions: expected torch functions"):
        register()


@pytest.mark.parametrize(
    "function",
    [lambda x: x, torch.nn.functional.tanh, torch.Tensor.as_subclass, torch.nn.Tanh(), StraightThrough.apply],
)
def test_rules_that_no_call_would_use_are_rejected(function):
    with pytest.raises(hodiff.InputError, match=r"register: functions: expected .* would never be used"):
        register(function)
    assert function not in RULES or function is torch.nn.functional.tanh


def test_rule_of_a_custom_operator_is_used():
    @torch.library.custom_op("hodiff_jet_tests::cubed", mutates_args=())
    def cubed(x: torch.Tensor) -> torch.Tensor:
        return x**3

    register(cubed)(lambda x: x * x * x)
    try:
        torch.testing.assert_close(hodiff.laplacian(lambda x: cubed(x).sum())(X), 6 * X.sum())
    finally:
        del RULES[torch.ops.hodiff_jet_tests.cubed.default]


def test_dropout_draws_once_for_all_coefficients():
    torch.manual_seed(0)
    x = randn(50)
    value, (slope,) = jet(lambda x: functional.dropout(x, 0.5), (x,), ([torch.ones(50, dtype=D)],))
    torch.testing.assert_close(value, slope * x)
    assert set(slope.tolist()) == {0.0, 2.0}


def test_explain_counts_functions_without_a_rule():
    assert explain(lambda x: torch.special.i1(x) + torch.special.i1(2 * x), X).nested == {"special.i1": 2}
    assert "every function has a rule" in str(explain(torch.tanh, X))


def test_conversions_to_numbers_are_rejected():
    for f, words in (
        (lambda x: float(x[0]) * x, r"float\(\) would lose the derivatives"),
        (lambda x: x[0].item() * x, "item would lose the derivatives"),
        (lambda x: x.numpy(), "numpy would lose the derivatives"),
        (lambda x: x.sum().backward(), "backward is not supported for a jet"),
        (lambda x: x.register_hook(print), "register_hook is not supported for a jet"),
    ):
        with pytest.raises(hodiff.InputError, match=words):
            jet(f, (X,), ([V],))
    # A comparison uses the values, as in torch.
    assert jet(lambda x: x[0] if x[0] > x[1] else x[1], (X,), ([V],))[0] == max(X[0], X[1])


@pytest.mark.parametrize(
    "f",
    [
        torch.nn.Parameter,
        lambda x: torch.func.linearize(torch.sin, x)[0],
        lambda x: hodiff.HessianOperator(cubic, x) @ X,
        lambda x: torch.func.linearize(lambda a: a * x, X)[0],
        lambda x: hodiff.HessianOperator(lambda a: cubic(a * x), X) @ X,
        lambda x: hodiff.HessianOperator(cubic, X) @ x,
        lambda x: hodiff.JacobianOperator(torch.sin, x) @ X,
        lambda x: hodiff.GaussNewtonOperator(torch.mul, functional.mse_loss, X, data=[(x, X)]) @ X,
        lambda x: hodiff.JacobianOperator(lambda a: a * x, X) @ X,
        lambda x: hodiff.optimize.least_squares(lambda a: a - x, X).x,
        lambda x: hodiff.optimize.minimize(lambda a: ((a - x) ** 2).sum(), X).x,
        lambda x: hodiff.sparse.hessian(cubic)(x).to_dense(),
        lambda x: torch.autograd.functional.jacobian(torch.sin, x, create_graph=True),
        lambda x: torch.autograd.functional.hvp(lambda a: cubic(a * x), X, X)[1],
    ],
    ids=[
        "parameter",
        "linearize",
        "operator",
        "linearize, closed over",
        "operator, closed over",
        "vector",
        "Jacobian",
        "data",
        "Jacobian, closed over",
        "least squares",
        "minimize",
        "sparse",
        "functional",
        "functional, closed over",
    ],
)
def test_functions_that_accept_tensors_only_are_named(f):
    with pytest.raises(hodiff.RouteError, match="a jet is passed to code that supports only tensors"):
        jet(f, (X,), ([V],))


def test_writing_into_an_outer_constant_is_rejected():
    out = torch.zeros(3, dtype=D)

    def f(x):
        out[0] = x[0]
        return out

    with pytest.raises(hodiff.InputError, match=r"cannot write a jet .*: create that tensor by"):
        jet(f, (X,), ([V],))


WRONG = {
    "no tuple": (X, ([V],), "primals: expected a tuple"),
    "no list": ((X,), (V,), r"series\[0\]: expected a list"),
    "counts": ((X, X), ([V],), "series: expected one for each of 2 primals, got 1"),
    "orders": ((X, X), ([V], [V, V]), r"series: expected lists of one length, the order, got \[1, 2\]"),
    "shape": ((X,), ([V, V[:2]],), r"series\[0\]\[1\]: v does not match x: expected \(3,\) float64, got \(2,\)"),
    "integers": ((torch.ones(2, dtype=torch.int64),), ([V],), r"primals\[0\]"),
}


@pytest.mark.parametrize("case", WRONG)
def test_rejects_bad_arguments(case):
    primals, series, words = WRONG[case]
    with pytest.raises(hodiff.InputError, match=words):
        jet(lambda *xs: xs[0], primals, series)


def test_nested_jets_in_threads_match():
    """Threads have separate call depths."""
    failures = []

    def run(seed):
        x = torch.randn(3, generator=torch.Generator().manual_seed(seed), dtype=D)
        for _ in range(20):
            outer = jet(lambda x: jet(cubic, (x,), ([V],))[1][0], (x,), ([V],))[1][0]
            if not torch.allclose(outer, 2 * cubic_along(x, V)[2]):
                failures.append(seed)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not failures
