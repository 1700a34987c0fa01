"""Operators on lists of tensors, against functions of one tensor, and against differences where torch is wrong."""

import pytest
import torch

import hodiff
from hodiff.torch_internals.operators import foreach_by_name

D = torch.float64
FOREACH = foreach_by_name()
A, B = torch.tensor([0.5, 1.0, 2.0], dtype=D), torch.tensor([[0.3], [0.2]], dtype=D)
X, V = torch.tensor([0.54, 0.7, 0.2], dtype=D), torch.tensor([1.0, -0.5, 0.3], dtype=D)

# The operator called with a differentiated tensor, and the same call by functions of one tensor
CASES = {
    "add, a tensor for all": (
        lambda x: FOREACH["add"]([A, B], x.sum(), alpha=2),
        lambda x: [A + 2 * x.sum(), B + 2 * x.sum()],
    ),
    "add, a tensor alone": (lambda x: FOREACH["add"]([A], x.sum()), lambda x: [A + x.sum()]),
    "add, lists": (lambda x: FOREACH["add"]([x, B], [x * x, x.sum()]), lambda x: [x + x * x, B + x.sum()]),
    "add, a number": (lambda x: FOREACH["add"]([x], 0.5), lambda x: [x + 0.5]),
    "add, by name": (lambda x: FOREACH["add"]([x], other=[x * x]), lambda x: [x + x * x]),
    "add_": (lambda x: FOREACH["add_"]([A.clone(), x * 1], x.sum()), lambda x: [A + x.sum(), x + x.sum()]),
    "maximum, a number": (
        lambda x: FOREACH["maximum"]([x, x * x], 0.6),
        lambda x: [x.clamp_min(0.6), (x * x).clamp_min(0.6)],
    ),
    "maximum, numbers": (lambda x: FOREACH["maximum"]([x], [0.6]), lambda x: [x.clamp_min(0.6)]),
    "maximum_": (lambda x: FOREACH["maximum_"]([x * 1], 0.6), lambda x: [x.clamp_min(0.6)]),
    "minimum, a number": (lambda x: FOREACH["minimum"]([x], 0.6), lambda x: [x.clamp_max(0.6)]),
    "minimum, lists": (lambda x: FOREACH["minimum"]([x], [x * x]), lambda x: [torch.minimum(x, x * x)]),
    "minimum_": (lambda x: FOREACH["minimum_"]([x * 1], 0.6), lambda x: [x.clamp_max(0.6)]),
    "mul, a tensor for all": (lambda x: FOREACH["mul"]([A, x], x.sum()), lambda x: [A * x.sum(), x * x.sum()]),
    "div, a tensor for all": (lambda x: FOREACH["div"]([A, x], x.sum()), lambda x: [A / x.sum(), x / x.sum()]),
    "norm": (lambda x: FOREACH["norm"]([x, x * x]), lambda x: [x.norm(), (x * x).norm()]),
    "norm of order 3": (lambda x: FOREACH["norm"]([x], 3), lambda x: [(x.abs() ** 3).sum() ** (1 / 3)]),
}


def cubes(f):
    return lambda x: sum((each**3).sum() for each in f(x))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("route", hodiff.ROUTES)
def test_products_match_single_tensor_functions_by_every_route(name, route):
    of_lists, of_one = CASES[name]
    with hodiff.corrected():
        for got, expected in zip(of_lists(X), of_one(X), strict=True):
            torch.testing.assert_close(got, expected)
    torch.testing.assert_close(
        hodiff.hvp(cubes(of_lists), X, V, route=route), hodiff.hvp(cubes(of_one), X, V, route="reverse-over-reverse")
    )


@pytest.mark.parametrize("name", CASES)
def test_first_derivatives_match_differences(name):
    f, h = cubes(CASES[name][0]), 1e-5
    expected = (f(X + h * V) - f(X - h * V)) / (2 * h)
    torch.testing.assert_close(hodiff.directional_derivatives(f, X, V, order=1)[1], expected, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("name", ["add, a tensor alone", "add_", "maximum, a number", "minimum, a number"])
def test_torch_alone_is_wrong(name):
    """The tests above would prove nothing if torch alone were right."""
    f = cubes(CASES[name][0])
    derivative = hodiff.directional_derivatives(f, X, V, order=1)[1]
    assert not torch.allclose(torch.func.jvp(f, (X,), (V,))[1], derivative)


def test_in_place_operators_return_their_list():
    tensors = [A.clone(), B.clone()]
    with hodiff.corrected():
        assert FOREACH["add_"](tensors, torch.ones((), dtype=D, requires_grad=True)) is tensors


@pytest.mark.parametrize("arguments", [([], 1.0), ([A], [A, B]), ([A], "two")])
def test_errors_match_torch(arguments):
    with pytest.raises((RuntimeError, TypeError)) as by_torch:
        FOREACH["add"](*arguments)
    x = A.clone().requires_grad_()
    tensors, other = arguments
    with pytest.raises(type(by_torch.value)) as ours, hodiff.corrected():
        FOREACH["add"]([x] * len(tensors), other)
    assert str(ours.value) == str(by_torch.value)


@pytest.mark.parametrize("name", ["maximum", "minimum", "maximum_", "minimum_"])
def test_ties_split_the_derivative_in_half(name):
    """Torch's reverse mode has the same convention, except in place."""
    tie = torch.tensor([0.6], dtype=D)

    def f(x):
        return FOREACH[name]([x * 1], 0.6)[0].sum()

    assert name.endswith("_") or torch.func.grad(f)(tie) == 0.5
    assert hodiff.corrected(torch.func.grad(f))(tie) == 0.5
    assert hodiff.jacobian(f, mode="forward")(tie) == 0.5


IN_PLACE = {
    "abs_": (),
    "addcdiv_": ([A], [A + 1], 0.5),
    "addcmul_": ([A], [A + 1], [0.5]),
    "clamp_max_": (0.6,),
    "copy_": ([A],),
    "div_": ([A],),
    "exp_": (),
    "lerp_": ([A], 0.3),
    "mul_": (2.0,),
    "pow_": (2.5,),
    "reciprocal_": (),
    "sigmoid_": (),
    "sqrt_": (),
    "sub_": (0.5,),
    "zero_": (),
}


@pytest.mark.parametrize("name", IN_PLACE)
@pytest.mark.parametrize("route", hodiff.ROUTES)
def test_in_place_change_of_a_saved_tensor_is_right_or_raises(name, route):
    """The graph saves the changed exponential: the product is correct, or raises torch's error of eager code."""

    def f(x):
        y = x.exp()
        FOREACH[name]([y], *IN_PLACE[name])
        return (y * x).sum()

    def apart(x):
        others = [each[0] if isinstance(each, list) else each for each in IN_PLACE[name]]
        y = x.exp().clone()
        if name.startswith("addc"):
            return (getattr(y, name)(*others[:2], value=others[2]) * x).sum()
        return (getattr(y, name)(*others) * x).sum()

    try:
        found = hodiff.hvp(f, X, V, route=route)
    except RuntimeError as error:
        found = error
    if isinstance(found, torch.Tensor):
        torch.testing.assert_close(found, hodiff.hvp(apart, X, V))
    else:
        assert "modified by an inplace operation" in str(found)


def test_row_of_scalars_is_accepted_unless_differentiated():
    """The row is accepted as numbers, and refused if it is differentiated."""
    row = torch.tensor([0.5], dtype=D)

    def f(row):
        y = A.clone()
        FOREACH["addcmul_"]([y], [A], [A + 1], row)
        return y.sum()

    x = torch.ones((), dtype=D, requires_grad=True)
    with hodiff.corrected():
        tensors = [A * x]
        FOREACH["addcmul_"](tensors, [A], [A + 1], row)
    torch.testing.assert_close(tensors[0].detach(), A + 0.5 * A * (A + 1))
    with pytest.raises(hodiff.RouteError, match="expected a number"):
        hodiff.directional_derivatives(f, row, torch.ones_like(row), order=1)
