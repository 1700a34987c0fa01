"""Tests of hodiff's Functions, custom rules and derivatives inside a function of jets."""

import math

import pytest
import torch
from drawing import normals, seeded
from functions.catalogue import CASES
from mpmath_series import D
from taylor.nested import along_a_curve, assert_all
from torch.utils import _pytree as pytree

import hodiff
from hodiff import functions, nn
from hodiff.authoring import custom_jvp, custom_vjp, elementwise
from hodiff.implicit import linear_solve, newton, root
from hodiff.taylor import explain, jet
from hodiff.taylor.jets import new_jet
from hodiff.taylor.passes import framed, through

randn = normals(seeded())


def numbers(tree):
    return [each for each in pytree.tree_leaves(tree) if isinstance(each, torch.Tensor) and each.is_floating_point()]


@pytest.mark.one_in(132)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_functions_of_the_catalogue_match_nested_forward_mode(case):
    """Series to order 3, and collapsed, match nested forward mode of primitives if the case has them."""
    inputs = case.draw()
    places = case.differentiated(inputs)
    points = [inputs[i].detach() for i in places]
    terms = [[0.3 * randn(*x.shape) for _ in range(3)] for x in points]
    order = min(3, case.order)

    def on(function):
        def run(*tensors):
            given = list(inputs)
            for i, each in zip(places, tensors, strict=True):
                given[i] = each
            return tuple(numbers_of(function(*given)))

        return run

    def numbers_of(tree):
        leaves = tree if isinstance(tree, (tuple, list)) else (tree,)
        return [each for each in leaves if each.is_floating_point()]

    def right(function, curves):
        zero = torch.zeros((), dtype=D)
        at = lambda t: on(function)(  # noqa: E731
            *(
                x + sum(c * t**k / math.factorial(k) for k, c in enumerate(own, 1))
                for x, own in zip(points, curves, strict=True)
            )
        )
        return [
            along_a_curve(lambda t, i=i: at(t)[i], zero, [zero + 1, *[zero] * (order - 1)])
            for i in range(len(on(function)(*points)))
        ]

    reference = case.surrogate or case.reference or case.function
    value, derivatives = jet(on(case.function), tuple(points), tuple(own[:order] for own in terms))
    torch.testing.assert_close(list(value), list(on(case.function)(*points)), rtol=1e-12, atol=1e-12)
    expected = right(reference, terms)
    for k in range(order):
        for found, exact in zip(derivatives[k], expected, strict=True):
            torch.testing.assert_close(found, exact[k + 1], rtol=1e-8, atol=1e-8)
    with framed(2, 2, collapsed=True) as frame:
        jets = [new_jet(frame, [x, torch.stack(own[:2]), own[2]]) for x, own in zip(points, terms, strict=True)]
        found, _ = through(frame, on(case.function), jets)
    half = [[own[i], own[2]] for i in range(2) for own in terms]
    sums = [right(reference, half[i * len(terms) : (i + 1) * len(terms)]) for i in range(2)]
    for i, coefficients in enumerate(found):
        top = torch.zeros_like(coefficients[0]) if coefficients[2] is None else coefficients[2]
        exact = (sums[0][i][2] + sums[1][i][2]) / 2
        torch.testing.assert_close(top, exact, rtol=1e-8, atol=1e-8)


X, V, W = randn(4), randn(4), randn(4, 4)
TERMS = [V, randn(4), randn(4)]


@custom_jvp
def sine(x):
    return torch.sin(x)


@sine.defjvp
def _(primals, tangents):
    (x,), (v,) = primals, tangents
    return sine(x), torch.cos(x) * v


@custom_jvp
def cut(x):
    return torch.floor(x)


@cut.defjvp
def _(primals, tangents):
    return cut(*primals), tangents[0] * primals[0]


@custom_vjp
def pair(p):
    return {"product": p["a"] * p["b"], "sine": torch.sin(p["a"])}


pair.defvjp(
    lambda p: (pair(p), p),
    lambda p, c: ({"a": c["product"] * p["b"] + c["sine"] * torch.cos(p["a"]), "b": c["product"] * p["a"]},),
)
by_slope = elementwise(torch.sin, derivative=lambda x: torch.cos(x))
rounded = hodiff.straight_through(torch.round, torch.sin)


def cubic(x):
    return (x**3).sum() + x[0] * x[1] * x[2]


def slope(x):
    zero = torch.zeros_like(x[0])
    return 3 * x**2 + torch.stack([x[1] * x[2], x[0] * x[2], x[0] * x[1], zero])


def curvature(x):
    a, b, c, zero = x[0], x[1], x[2], torch.zeros_like(x[0])
    mixed = [[zero, c, b, zero], [c, zero, a, zero], [b, a, zero, zero], [zero] * 4]
    return torch.diag(6 * x) + torch.stack([torch.stack(row) for row in mixed])


ONES = torch.ones(4, dtype=D)
INSIDE = {
    "custom_jvp": (lambda x: sine(x) * x, lambda x: torch.sin(x) * x),
    "custom_vjp": (
        lambda x: pair({"a": x, "b": x * x})["product"] + pair({"a": x, "b": W[0]})["sine"],
        lambda x: x**3 + x.sin(),
    ),
    "elementwise": (lambda x: by_slope(x) * x, lambda x: torch.sin(x) * x),
    "hvp": (lambda x: hodiff.hvp(cubic, x, x * x), lambda x: curvature(x) @ (x * x)),
    "hvp, closed over": (lambda x: hodiff.hvp(lambda w: cubic(w * x), ONES, V), lambda x: x * (curvature(x) @ (x * V))),
    "hvp, closed over what is curved": (
        lambda x: (lambda y: hodiff.hvp(lambda w: cubic(w * y), ONES, V))(x * x),
        lambda x: x * x * (curvature(x * x) @ (x * x * V)),
    ),
    "hessian": (lambda x: hodiff.hessian(cubic)(x), curvature),
    "hessian, closed over": (
        lambda x: hodiff.hessian(lambda w: cubic(w * x))(ONES),
        lambda x: curvature(x) * x * x[:, None],
    ),
    "hessian_diagonal": (lambda x: hodiff.hessian_diagonal(cubic)(x), lambda x: 6 * x),
    "jacobian": (lambda x: hodiff.jacobian(lambda a: torch.sin(W @ a))(x), lambda x: torch.cos(W @ x)[:, None] * W),
    "value_grad_hvp": (lambda x: hodiff.value_grad_hvp(cubic, x, V)[1], slope),
    "hvp_function": (lambda x: hodiff.hvp_function(cubic)(x, V), lambda x: curvature(x) @ V),
    "laplacian": (lambda x: hodiff.laplacian(cubic)(x), lambda x: 6 * x.sum()),
    "laplacian, closed over": (
        lambda x: hodiff.laplacian(lambda w: cubic(w * x))(ONES),
        lambda x: 6 * (x**3).sum(),
    ),
    "directional_derivatives": (
        lambda x: hodiff.directional_derivatives(cubic, x, x, order=2)[2],
        lambda x: x @ (curvature(x) @ x),
    ),
    "checkpoint": (lambda x: functions.checkpoint(lambda a: torch.sin(a) * x, x), lambda x: torch.sin(x) * x),
    "checkpoint, closed over": (lambda x: functions.checkpoint(lambda: torch.sin(x) * x), lambda x: torch.sin(x) * x),
    "torch's checkpoint": (
        lambda x: torch.utils.checkpoint.checkpoint(lambda a: torch.sin(a) * x, x, use_reentrant=False),
        lambda x: torch.sin(x) * x,
    ),
    "root": (
        lambda x: root(lambda z, p: z * z - p, newton())(ONES, x.exp()),
        lambda x: (x / 2).exp(),
    ),
    "linear_solve": (lambda x: linear_solve(lambda z, p: (2 + p * p) * z, V, x), lambda x: V / (2 + x * x)),
    "a module": (lambda x: nn.Swish(1.5).double()(x), lambda x: x * torch.sigmoid(1.5 * x)),
    "a list": (lambda x: functions.weighted_sum([x, x * x], [2.0, 3.0]), lambda x: 2 * x + 3 * x * x),
}


@pytest.mark.one_in(22)
@pytest.mark.parametrize("name", INSIDE)
def test_custom_rules_and_derivatives_inside_match(name):
    f, right = INSIDE[name]
    assert_all(f, right, X, TERMS, rtol=1e-6, atol=1e-8)


def test_custom_rule_is_followed_even_if_it_is_no_derivative():
    """Custom rules: the value of `floor` with the derivative of x² / 2, and `round` with the derivative of the sine."""
    value, (first, second) = jet(cut, (X,), ([V, 0 * V],))
    torch.testing.assert_close((value, first, second), (X.floor(), X * V, V * V))
    value, (first, second) = jet(rounded, (X,), ([V, 0 * V],))
    torch.testing.assert_close((value, first, second), (X.round(), X.cos() * V, -X.sin() * V * V))


def test_clipped_and_noisy_gradients_are_rejected():
    for f in (
        lambda x: functions.clip_gradient(x, -1, 1),
        lambda x: functions.noise_gradient(x, 1.0, torch.Generator()),
    ):
        with pytest.raises(hodiff.RouteError, match="forward mode"):
            jet(f, (X,), ([V],))


def test_generators_draw_once_for_all_coefficients():
    """A generator among the arguments draws once for value and derivatives."""

    def f(x):
        return functions.gumbel_softmax(x, generator=torch.Generator().manual_seed(3))

    def written_out(x):
        noise = functions.sample_gumbel(X, generator=torch.Generator().manual_seed(3))
        return torch.softmax(x + noise, -1)

    assert_all(f, written_out, X, TERMS)
    shared = torch.Generator().manual_seed(3)
    value, _ = jet(lambda x: functions.gumbel_softmax(x, generator=shared), (X,), ([V, V],))
    torch.testing.assert_close(value, written_out(X))


def test_writing_to_a_closed_over_value_is_rejected():
    def f(x):
        y = x * x

        def written(a):
            y.mul_(2)
            return (a * y).sum()

        return hodiff.hvp(written, ONES, V)

    with pytest.raises(hodiff.InputError, match="writes to a jet"):
        jet(f, (X,), ([V],))


def test_explain_counts_nested_functions():
    assert explain(lambda x: functions.soft_sort(x) + functions.swish(x), X).nested == {"soft_sort": 1}
