"""A wrong rule of `custom_jvp` or `custom_vjp` is found at its call, and correct rules give no finding."""

import inspect

import pytest
import torch

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

WRONG = {
    "a sign": (lambda x: wrong(right(x)).sum(), wrong_rule),
    "a factor, by one argument": (lambda x: product(x, right(x)), backward),
    "the second derivative": (lambda x: constant_slope(right(2 * x)), detached),
    "itself": (wrong, wrong_rule),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", WRONG)
def test_wrong_rule_is_located(name):
    f, rule = WRONG[name]
    report = hodiff.check(f, X, scipy=False)
    (finding,) = report.errors
    assert finding.code == "HD117", str(report)
    assert finding.location.endswith(f"test_custom_rules.py:{inspect.getsourcelines(rule)[1]}")


@pytest.mark.slow
def test_right_rules_have_no_finding():
    assert hodiff.check(lambda x: right(x) * right(2 * x), X, scipy=False).codes == ()
