"""A wrong rule of `custom_jvp`, `custom_vjp` or `elementwise` is located, and correct rules give no finding."""

import inspect

import pytest
import torch
from zoo.bases import Cube

import hodiff

X = torch.tensor([0.5, -1.2, 2.0], dtype=torch.float64)


@hodiff.custom_jvp
def right(x):
    return torch.sin(x)


@right.defjvp
def right_rule(primals, tangents):
    return right(*primals), torch.cos(*primals) * tangents[0]


@hodiff.custom_jvp
def wrong(x):
    return torch.exp(x)


@wrong.defjvp
def wrong_rule(primals, tangents):
    return wrong(*primals), -wrong(*primals) * tangents[0]


@hodiff.custom_vjp
def product(a, b):
    return a * b


def backward(residuals, g):
    a, b = residuals
    return g * b, 2 * g * a


product.defvjp(lambda a, b: (a * b, (a, b)), backward)


@hodiff.custom_vjp
def constant_slope(x):
    return x**3


def detached(x, g):
    return (3 * x.detach() ** 2 * g,)


constant_slope.defvjp(lambda x: (x**3, x), detached)

other_value = hodiff.custom_vjp(lambda x: x * x)
other_value.defvjp(lambda x: (x * x + 1e-2, x), lambda x, g: (2 * x * g,))

affine = hodiff.custom_jvp(lambda x: x * x)
affine.defjvp(lambda primals, tangents: (affine(*primals), 2 * primals[0] * tangents[0] + 1))


def slope(x):
    return 1.001 * x.cos()


sine = hodiff.authoring.elementwise(torch.sin, derivative=slope, name="sine")
scaled = hodiff.authoring.elementwise(lambda x, y: x * y.sin(), derivative=(lambda x, y: y.sin(), lambda x, y: x.sin()))


def backward_in_place(x, g):
    return (g.mul_(2 * x),)


in_place = hodiff.custom_vjp(lambda x: x * x)
in_place.defvjp(lambda x: (x * x, x), backward_in_place)


def residuals_in_place(x, g):
    return (x.mul_(2).mul_(g),)


spoiling = hodiff.custom_vjp(lambda x: x * x)
spoiling.defvjp(lambda x: (x * x, x), residuals_in_place)


def square_of_double(x):
    return x.mul_(2) * x


writing = hodiff.custom_vjp(square_of_double)
writing.defvjp(lambda x: (square_of_double(x), x), lambda x, g: (4 * x * g,))

WRONG = {
    "a sign": (lambda x: wrong(right(x)).sum(), wrong_rule),
    "a factor, by one argument": (lambda x: product(x, right(x)), backward),
    "the second derivative": (lambda x: constant_slope(right(2 * x)), detached),
    "itself": (wrong, wrong_rule),
    "beside a right Function": (lambda x: wrong(Cube.apply(x)), wrong_rule),
    "another value in forward": (lambda x: other_value(right(x)), other_value.backward),
    "a rule that is not linear": (lambda x: affine(right(x)), affine.rule),
    "elementwise": (lambda x: sine(right(x)), slope),
    "elementwise itself": (sine, slope),
    "elementwise, of the second input": (lambda x: scaled(x, x + 1), scaled.Function.formulas[1]),
}
IN_PLACE = {
    "the cotangent": ("HD301", lambda x: in_place(right(x)) + x, backward_in_place),
    "a residual": ("HD302", lambda x: spoiling(right(x)) + x, residuals_in_place),
    "an argument": ("HD303", lambda x: writing(right(x)), square_of_double),
}
QUICK = {"scipy": False, "vmap": False}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", WRONG)
def test_wrong_rule_is_located(name):
    f, rule = WRONG[name]
    report = hodiff.check(f, X, order=2 if name == "the second derivative" else 1, **QUICK)
    (finding,) = report.errors
    assert finding.code == "HD117", str(report)
    assert finding.location.endswith(f"test_custom_rules.py:{inspect.getsourcelines(rule)[1]}")


@pytest.mark.parametrize("name", IN_PLACE)
def test_rule_that_writes_in_place_is_located(name):
    code, f, rule = IN_PLACE[name]
    report = hodiff.check(f, X, order=1, **QUICK)
    (finding,) = report.errors
    assert finding.code == code, str(report)
    assert finding.location.endswith(f"test_custom_rules.py:{inspect.getsourcelines(rule)[1]}")


def test_evidence_of_a_wrong_value_names_the_rule():
    (finding,) = hodiff.check(other_value, X, order=1, **QUICK).errors
    assert "forward: expected the value of the function, got a value that differs by 1.0e-02" in finding.message


@pytest.mark.slow
def test_right_rules_have_no_finding():
    cosine = hodiff.authoring.elementwise(torch.cos, derivative=lambda x: -x.sin())
    assert hodiff.check(lambda x: right(x) * cosine(2 * x), X, scipy=False).codes == ()
