"""Values that rules may return and receive, and the error messages for misuse."""

from collections import namedtuple
from functools import partial

import pytest
import torch
from authoring.problems import (
    app_jvp,
    app_vjp,
    draw,
    fixed_point,
    log1pexp,
    newton_step,
    scaled_gradient,
    sine_product,
    sqrt_ratio,
)
from torch.func import grad

import hodiff
from hodiff.authoring import custom_jvp, custom_vjp, elementwise, straight_through
from hodiff.checks import derivative, route_names


def twice(x):
    return 2 * x


def jvp_of(rule, f=twice, **options):
    made = custom_jvp(f, **options)
    made.defjvp(rule)
    return made


def vjp_of(forward, backward, f=twice, **options):
    made = custom_vjp(f, **options)
    made.defvjp(forward, backward)
    return made


def test_log1pexp_derivatives_stay_finite_where_the_formula_overflows():
    x = torch.tensor([-800.0, 0.0, 800.0], dtype=torch.float64)
    for order, expected in ((1, [0.0, 0.5, 1.0]), (2, [0.0, 0.25, 0.0])):
        for route in route_names(order):
            found = derivative(lambda x: log1pexp(x.clamp(max=700)).sum(), route)(
                x, *[torch.ones_like(x)] * (order - 1)
            )
            torch.testing.assert_close(found[:2], torch.tensor(expected[:2], dtype=torch.float64))


def test_rule_sets_the_derivative_at_the_edge_of_a_domain():
    assert torch.func.grad(lambda x: x / (1 + x.sqrt()))(torch.tensor(0.0)).isnan()
    assert float(torch.func.grad(sqrt_ratio)(torch.tensor(0.0))) == 1
    assert float(torch.func.jvp(sqrt_ratio, (torch.tensor(0.0),), (torch.tensor(1.0),))[1]) == 1


@pytest.mark.parametrize("app", [app_jvp, app_vjp], ids=["jvp", "vjp"])
def test_static_arguments_are_passed_to_the_rule(app):
    (x,) = draw(3)
    # The rule doubles the derivative of sin at every order, by every route.
    for order in (1, 2, 3):
        directions = [torch.ones_like(x)] * (order - 1)
        expected = derivative(lambda x: 2 * x.sin().sum(), "-over-".join(["reverse"] * order))(x, *directions)
        for route in route_names(order):
            found = derivative(lambda x: app(torch.sin, x).sum(), route)(x, *directions)
            torch.testing.assert_close(found, expected)
    torch.testing.assert_close(app(torch.sin, x), x.sin())


@pytest.mark.one_in(2)
@pytest.mark.parametrize("app", [app_jvp, app_vjp], ids=["jvp", "vjp"])
def test_static_functions_compile(app):
    (x,) = draw(3)
    torch.compiler.reset()
    compiled = torch.compile(lambda x: app(torch.sin, x), fullgraph=True, backend="aot_eager")
    leaf = x.clone().requires_grad_()
    torch.testing.assert_close(torch.autograd.grad(compiled(leaf).sum(), leaf)[0], 2 * x.cos())
    slope = torch.compile(lambda x: torch.func.jvp(lambda x: app(torch.sin, x), (x,), (x,))[1], backend="aot_eager")
    torch.testing.assert_close(slope(x), 2 * x.cos() * x)


def test_compiling_rejects_static_functions_with_closures():
    scale = 2.0
    torch.compiler.reset()
    with pytest.raises(Exception, match="function without closure"):
        torch.compile(lambda x: app_jvp(lambda y: scale * y, x), fullgraph=True, backend="aot_eager")(torch.ones(2))


def test_scaled_gradient_multiplies_the_gradient():
    x = torch.tensor(3.0, requires_grad=True)
    (5 * scaled_gradient(x, 0.5)).backward()
    assert float(x.grad) == 2.5


def test_fixed_point_derivatives_match_the_root():
    a = torch.tensor(4.0, dtype=torch.float64)
    root = lambda a: fixed_point(newton_step, a, torch.ones_like(a))  # noqa: E731
    assert float(torch.func.grad(root)(a)) == pytest.approx(0.25)
    assert float(torch.func.grad(torch.func.grad(root))(a)) == pytest.approx(-1 / 32)


def test_keywords_and_defaults_become_positional_arguments():
    @custom_jvp
    def power(x, n=2.0):
        return x**n

    power.defjvp(lambda primals, tangents: (power(*primals), primals[1] * primals[0] ** (primals[1] - 1) * tangents[0]))
    x = torch.tensor(3.0, requires_grad=True)
    for call in (lambda: power(x), lambda: power(x=x), lambda: power(n=2.0, x=x)):
        assert float(torch.autograd.grad(call(), x)[0]) == 6


def test_rule_receives_zero_tangents_of_constant_arguments():
    seen = []

    def rule(primals, tangents):
        seen.append(tangents)
        return primals[0] * 2, 2 * tangents[0]

    x, still, index = torch.ones(2, requires_grad=True), torch.ones(2), torch.tensor([0, 1])
    for symbolic in (False, True):
        f = custom_jvp(lambda x, still, index, number, word: 2 * x)
        f.defjvp(rule, symbolic_zeros=symbolic)
        f(x, still, index, 3, "word").sum().backward()
    zeros, symbols = seen
    assert torch.equal(zeros[1], torch.zeros(2))
    assert zeros[2:] == (None, 0.0, None)
    assert symbols[1:] == (None, None, None, None)


def test_none_counts_as_zero_tangent_and_cotangent():
    f = jvp_of(
        lambda primals, tangents: ((primals[0] * 1, primals[0] * 2), (None, 2 * tangents[0])), lambda x: (x, 2 * x)
    )
    x = torch.ones(2, requires_grad=True)
    a, b = f(x)
    torch.testing.assert_close(torch.autograd.grad((a + b).sum(), x)[0], torch.full((2,), 2.0))
    tangents = torch.func.jvp(f, (x.detach(),), (torch.ones(2),))[1]
    torch.testing.assert_close(tangents, (torch.zeros(2), torch.full((2,), 2.0)))
    g = vjp_of(lambda p: (p["a"] * 2, None), lambda _, c: ({"a": 2 * c, "b": None},), lambda p: p["a"] * 2)
    b = torch.ones(2, requires_grad=True)
    assert torch.autograd.grad(g({"a": x, "b": b}).sum(), b, allow_unused=True)[0] is None


def test_integer_outputs_have_no_derivative():
    f = jvp_of(lambda primals, tangents: (f(*primals), (2 * tangents[0], None)), lambda x: (2 * x, x.argmax()))
    x = torch.tensor([1.0, 3.0], requires_grad=True)
    values, index = f(x)
    assert not index.requires_grad
    values.sum().backward()
    torch.testing.assert_close(x.grad, torch.full((2,), 2.0))
    torch.testing.assert_close(torch.func.jvp(f, (x.detach(),), (torch.ones(2),))[1][0], torch.full((2,), 2.0))


@pytest.mark.slow
@pytest.mark.parametrize("view", [lambda x: x, lambda x: x[0]], ids=["itself", "part"])
def test_functions_may_return_views_of_their_argument(view):
    f = jvp_of(lambda primals, tangents: (view(primals[0]), 3 * view(tangents[0])), view)
    g = vjp_of(lambda x: (view(x), x), lambda x, c: (3 * torch.func.vjp(view, x)[1](c)[0],), view)
    (x,) = draw((2, 2))
    for each in (f, g):
        # The rules triple the derivative on purpose: finite differences disagree, but the routes agree.
        hodiff.assert_differentiable(lambda x, each=each: each(x).sin(), x, vmap=False, scipy=False, approximate=True)
        torch.testing.assert_close(
            torch.func.grad(lambda x, each=each: each(x).sum())(x), 3 * torch.func.grad(lambda x: view(x).sum())(x)
        )


def test_residuals_are_differentiated():
    x = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    y = torch.tensor(1.3, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(sine_product(x, y), x, create_graph=True)
    second = torch.autograd.grad(slope, (x, y))
    torch.testing.assert_close(second, (-x.sin() * y, x.cos()))


def saved_bytes(f, *inputs):
    held = {}

    def pack(tensor):
        held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = f(*inputs)
    del output
    return sum(held.values())


def test_saved_bytes_count_residuals_once():
    x = torch.ones(100, requires_grad=True)
    assert saved_bytes(log1pexp, x) == 400
    same = vjp_of(lambda x: ((y := x.exp()), (x, y, y)), lambda saved, c: (c * saved[1],), torch.exp)
    assert saved_bytes(same, x) == 800
    more = vjp_of(lambda x: (x.sin(), x.cos()), lambda saved, c: (c * saved,), torch.sin)
    assert saved_bytes(more, x) == 800
    assert saved_bytes(elementwise(torch.tanh, derivative=lambda _x, y: 1 - y * y), x) == 400
    assert saved_bytes(elementwise(twice, derivative=lambda _x: 2.0), x) <= 400


def test_check_rule_passes_right_rules_and_rejects_wrong_ones():
    log1pexp.check_rule(*draw(3))
    sine_product.check_rule(*draw(3, 3))
    x = torch.ones(3)
    crooked = jvp_of(lambda primals, tangents: (2 * primals[0], tangents[0] ** 2))
    with pytest.raises(hodiff.InputError, match=r"twice: tangent_out: expected a rule L that is linear"):
        crooked.check_rule(x)
    other = jvp_of(lambda primals, tangents: (3 * primals[0], 2 * tangents[0]))
    with pytest.raises(hodiff.InputError, match=r"twice: primal_out: expected the value of the function, .* 1.0e\+00"):
        other.check_rule(x)
    clamped = vjp_of(lambda x: (2 * x, None), lambda _, c: (c.clamp(-0.1, 0.1),))
    with pytest.raises(hodiff.InputError, match=r"twice: backward: expected a rule L that is linear"):
        clamped.check_rule(x)
    elsewhere = vjp_of(lambda x: (3 * x, None), lambda _, c: (2 * c,))
    with pytest.raises(hodiff.InputError, match=r"twice: forward: expected the value of the function"):
        elsewhere.check_rule(x)


ONE = (torch.ones(2),)


def differentiate(f, *inputs):
    leaves = [x.clone().requires_grad_() if isinstance(x, torch.Tensor) else x for x in inputs]
    torch.autograd.grad(f(*leaves).sum(), [x for x in leaves if isinstance(x, torch.Tensor)])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: custom_jvp(twice), r"custom_jvp: twice: expected a rule, got none; define it by twice\.defjvp"),
        (lambda: custom_vjp(twice), r"custom_vjp: twice: expected a rule, got none; define it by twice\.defvjp"),
        (lambda: jvp_of(lambda p, t: 2 * t[0]), r"twice: rule: expected \(primal_out, tangent_out\), got Tensor"),
        (lambda: jvp_of(lambda p, t: (p[0], t[0].sum())), r"twice: tangent_out: expected shape \(2,\).*got \(\)"),
        (lambda: jvp_of(lambda p, t: (p[0].sum(), t[0])), r"twice: primal_out: expected shape \(2,\), got \(\)"),
        (lambda: jvp_of(lambda p, t: (p[0], t)), r"twice: tangent_out: expected a tensor.*got tuple"),
        (lambda: jvp_of(lambda p, t: (p, t[0])), r"twice: primal_out: expected a tensor.*got tuple"),
        (
            lambda: vjp_of(lambda x: 2 * x, lambda r, c: (c,)),
            r"twice: forward: expected \(output, residuals\), got Tensor",
        ),
        (
            lambda: vjp_of(lambda x: (2 * x, None), lambda r, c: c),
            r"twice: backward: expected a tuple of 1.*got Tensor",
        ),
        (lambda: vjp_of(lambda x: (2 * x, None), lambda r, c: (c, c)), r"expected a tuple of 1.*got tuple of 2"),
        (lambda: vjp_of(lambda x: (2 * x, None), lambda r, c: (c.sum(),)), r"expected shape \(2,\) for x.*got \(\)"),
        (
            lambda: vjp_of(lambda x: (2 * x, None), lambda r, c: (1.0,)),
            r"backward: expected tensors or None, got float",
        ),
    ],
)
def test_rejects_rules_that_return_wrong_values(make, message):
    with pytest.raises(hodiff.InputError, match=message):
        differentiate(make(), *ONE)


SQUARES_IN_PLACE = {
    "cotangent": vjp_of(lambda x: (x * x, x), lambda x, c: (c.mul_(2 * x),), lambda x: x * x),
    "residuals": vjp_of(lambda x: (x * x, x), lambda x, c: (x.mul_(2).mul_(c),), lambda x: x * x),
}
SLOPE_IN_PLACE = vjp_of(lambda x: (x * x, 2 * x), lambda slope, c: (slope.mul_(c),), lambda x: x * x)
ROUTES_TO_BACKWARD = {
    "autograd": lambda f, x, c: torch.autograd.grad(f(leaf := x.clone().requires_grad_()), leaf, c),
    "vjp": lambda f, x, c: torch.func.vjp(f, x)[1](c),
    "vjp of vmap": lambda f, x, c: torch.func.vjp(torch.func.vmap(f), x)[1](c),
    "jacobian": lambda f, x, _: hodiff.jacobian(f)(x),
}


@pytest.mark.parametrize("route", ROUTES_TO_BACKWARD)
@pytest.mark.parametrize("written", SQUARES_IN_PLACE)
def test_rejects_backward_rules_that_write_in_place(written, route):
    """Otherwise another summand of the function would read the changed cotangent, with a wrong gradient."""
    x = torch.tensor([0.5, 2.0], dtype=torch.float64)
    f = SQUARES_IN_PLACE[written]
    with pytest.raises(hodiff.InputError, match=rf"backward: expected a rule that leaves its {written} unchanged"):
        ROUTES_TO_BACKWARD[route](lambda x: f(x) + x, x, torch.ones_like(x))


def test_rejects_backward_rules_that_write_into_computed_residuals():
    leaf = torch.ones(2, requires_grad=True)
    with pytest.raises(hodiff.InputError, match=r"leaves its residuals unchanged"):
        torch.autograd.grad(SLOPE_IN_PLACE(leaf), leaf, torch.ones(2))
    # Transforms compute the residuals again for each pullback.
    assert torch.equal(torch.func.vjp(SLOPE_IN_PLACE, torch.ones(2))[1](torch.ones(2))[0], torch.full((2,), 2.0))


def test_rejects_rules_that_return_wrong_pytrees():
    f = vjp_of(lambda p: (p["a"] * 2, None), lambda _, c: ({"a": c},), lambda p: p["a"] * 2)
    x = torch.ones(2, requires_grad=True)
    total = f({"a": x, "b": x}).sum()
    with pytest.raises(hodiff.InputError, match="backward: expected the structure"):
        total.backward()
    h = vjp_of(lambda p: (p["a"] * 2, None), lambda _, c: ({"a": c, "b": c.sum()},), lambda p: p["a"] * 2)
    total = h({"a": x, "b": x}).sum()
    with pytest.raises(hodiff.InputError, match=r"expected shape \(2,\) for p\['b'\]"):
        total.backward()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: custom_jvp(3), "custom_jvp: f: expected a callable, got int"),
        (lambda: custom_jvp(lambda x, *, y: x), "got y by keyword only"),
        (lambda: custom_jvp(lambda x, **kw: x), r"got \*\*kw by keyword only"),
        (lambda: custom_jvp(twice, nondiff_argnums=1), "expected positions below 1"),
        (lambda: custom_jvp(twice, nondiff_argnums=-1), "expected non-negative ints, got -1"),
        (lambda: custom_jvp(twice).defjvp(None), r"twice\.defjvp: expected a callable, got NoneType"),
        (lambda: custom_jvp(twice).defjvps(twice, twice), "expected one rule for each of 1 arguments, got 2"),
        (lambda: custom_jvp(torch.add, nondiff_argnums=0).defjvps(None, twice), "expected no nondiff_argnums"),
        (lambda: log1pexp(torch.ones(2), torch.ones(2)), "log1pexp: too many positional arguments"),
        (lambda: log1pexp(y=torch.ones(2)), "log1pexp: missing a required argument: 'x'"),
        (lambda: elementwise(twice, derivative=3), "expected functions, got int"),
        (lambda: elementwise(twice, derivative=(twice, twice)), "one function for each of the 1 inputs"),
        (lambda: elementwise(twice, derivative=lambda a, b, c: a), "got one of 3 parameters"),
        (lambda: elementwise(twice, derivative=twice)(torch.ones(2), 1), "twice: expected 1 arguments, got 2"),
        (lambda: elementwise(twice, derivative=twice)(1.0), "expected at least one tensor, got numbers only"),
        (
            lambda: elementwise(twice, derivative=twice)(torch.ones(2).long()),
            "expected a floating-point tensor, got int64",
        ),
        (
            lambda: elementwise(torch.sum, derivative=lambda x: x, name="total")(torch.ones(2)),
            "expected an elementwise",
        ),
        (
            lambda: elementwise(lambda x, y: x * y, derivative=(twice, None), name="m"),
            "got one of 1 parameters",
        ),
    ],
)
def test_rejects_misuse_of_decorators(call, message):
    with pytest.raises(hodiff.InputError, match=message):
        call()


def capturing(kind, w):
    """Return a function of x that closes over w, whose gradient would be lost."""
    if kind == "jvp":
        return jvp_of(lambda p, t: (p[0] * 2, t[0] * 2), lambda x: x * w)
    if kind == "vjp":
        return vjp_of(lambda x: (x * w, None), lambda _, c: (c,), lambda x: x * w)
    if kind == "elementwise":
        return elementwise(lambda x: x * w, derivative=lambda x: 2 * x)
    if kind == "static":
        return lambda x: app_jvp(lambda y: w * y, x)
    if kind == "hidden":
        # The closure of the function and its neighbours does not contain w itself.
        holder = type("Holder", (), {"w": w})()
        return jvp_of(lambda p, t: (p[0] * 2, t[0] * 2), lambda x: x * holder.w)
    raise AssertionError(kind)


KINDS = ["jvp", "vjp", "elementwise", "static", "hidden"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("needed", [True, False], ids=["x needed", "x constant"])
def test_rejects_closure_over_a_parameter(kind, needed):
    x = torch.ones(2, requires_grad=needed)
    with pytest.raises(hodiff.InputError, match=r"closes over.*pass it as an argument"):
        capturing(kind, torch.ones(2, requires_grad=True))(x)
    constant = capturing(kind, torch.full((2,), 2.0))
    torch.testing.assert_close(constant(x), torch.full((2,), 2.0))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "transform",
    [
        lambda f, w: torch.func.grad(f)(w),
        lambda f, w: torch.func.jvp(f, (w,), (w,)),
        lambda f, w: torch.func.grad(lambda w: torch.func.grad(f)(w).sum())(w),
        lambda f, w: torch.func.jvp(torch.func.grad(f), (w,), (w,)),
    ],
    ids=["grad", "jvp", "grad grad", "jvp grad"],
)
def test_rejects_closure_over_a_tensor_that_a_transform_tracks(kind, transform):
    x = torch.ones(2)
    with pytest.raises(hodiff.InputError, match=r"closes over.*pass it as an argument"):
        transform(lambda w: capturing(kind, w)(x).sum(), torch.ones(2))


def test_namedtuples_match_the_outputs_of_rules():
    pair = namedtuple("pair", "a b")
    f = custom_jvp(lambda x: pair(x * x, x.sin()))
    f.defjvp(
        lambda primals, tangents: (f(*primals), pair(2 * primals[0] * tangents[0], primals[0].cos() * tangents[0]))
    )
    x = torch.linspace(-1, 2, 3, dtype=torch.float64)
    torch.testing.assert_close(grad(lambda x: (f(x).a * f(x).b).sum())(x), 2 * x * x.sin() + x * x * x.cos())


@pytest.mark.parametrize("derivative", [torch.cos, torch.Tensor.cos, partial(torch.cos)])
def test_elementwise_derivatives_may_lack_a_signature(derivative):
    sine, x = elementwise(torch.sin, derivative=derivative), torch.linspace(-1, 2, 3, dtype=torch.float64)
    torch.testing.assert_close(grad(lambda x: sine(x).sum())(x), x.cos())


def test_rejects_methods():
    class Holder:
        @custom_jvp
        def method(self, x):
            return x

    with pytest.raises(hodiff.InputError, match="expected a plain function, got a method of Holder"):
        Holder().method(torch.ones(2))


def test_result_requires_no_grad_without_recording():
    x = torch.ones(2, requires_grad=True)
    with torch.no_grad():
        assert not log1pexp(x).requires_grad
    assert not log1pexp(x.detach()).requires_grad


def test_only_needed_arguments_are_differentiated():
    calls = []

    def of_y(tangent, out, x, y):
        calls.append("y")
        return tangent * x

    f = custom_jvp(lambda x, y: x * y)
    f.defjvps(lambda tangent, out, x, y: tangent * y, of_y)
    x = torch.ones(2, requires_grad=True)
    f(x, torch.ones(2)).sum().backward()
    assert not calls


def test_straight_through_has_value_of_one_function_and_derivatives_of_the_other():
    sign = straight_through(torch.sign, torch.tanh, name="sign")
    (x,) = draw(3)
    torch.testing.assert_close(sign(x), x.sign())
    for order in (1, 2, 3):
        directions = [torch.ones_like(x)] * (order - 1)
        expected = derivative(lambda x: x.tanh().sum(), "-over-".join(["reverse"] * order))(x, *directions)
        for route in route_names(order):
            torch.testing.assert_close(derivative(lambda x: sign(x).sum(), route)(x, *directions), expected)


PARTS = {
    "an element": (lambda x: torch.stack([x * x, x])[0], lambda x, c: 2 * c * x),
    "a chunk": (
        lambda x: (x * x).chunk(2)[1][None],
        lambda x, c: torch.cat([torch.zeros_like(c[0]), 2 * c[0] * x[1:]]),
    ),
    "real parts": (lambda x: torch.complex(x * x, x).real, lambda x, c: 2 * c * x),
}


@pytest.mark.parametrize("name", PARTS)
def test_results_that_are_parts_of_a_larger_tensor_have_tangents(name):
    f, pullback = PARTS[name]
    rule = hodiff.custom_vjp(f)
    rule.defvjp(lambda x: (f(x), x), lambda x, c: (pullback(x, c),))
    x, v = torch.tensor([0.3, -1.0], dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, v)
        found = torch.autograd.forward_ad.unpack_dual(rule(dual)).tangent
    torch.testing.assert_close(found, torch.func.jvp(f, (x,), (v,))[1])
    assert hodiff.check(rule, x).codes == ()
