"""hodiff.directional_derivatives: the Taylor coefficients of t ↦ f(x + t v), times k!."""

import math
from typing import Any

import mpmath
import pytest
import torch
from cases import CASES, Case, ravel, unravel
from cases import case as named
from custom_functions import custom
from derivatives.oracles import assert_same_structure, flat_function, reference, second_differences
from drawing import draw
from torch import Tensor

from hodiff import RouteError, directional_derivatives


@pytest.mark.parametrize("order", range(7))
def test_exponential_matches_closed_form(order: int) -> None:
    x, v = draw(3), draw(3, seed=1)
    derivatives = directional_derivatives(torch.exp, x, v, order=order)
    assert isinstance(derivatives, tuple)
    assert len(derivatives) == order + 1
    for k, derivative in enumerate(derivatives):
        torch.testing.assert_close(derivative, v**k * x.exp(), rtol=1e-12, atol=1e-14)


def test_cubic_has_zero_derivatives_beyond_its_degree() -> None:
    x, v = draw(4), draw(4, seed=1)
    derivatives = directional_derivatives(lambda y: (y**3).sum(), x, v, order=5)
    expected = [x**3, 3 * x**2 * v, 6 * x * v**2, 6 * v**3, 0 * v, 0 * v]
    for derivative, terms in zip(derivatives, expected, strict=True):
        torch.testing.assert_close(derivative, terms.sum(), rtol=1e-12, atol=1e-12)


ELEMENTARY = {
    "tanh": (torch.tanh, mpmath.tanh),
    "sin∘exp": (lambda t: torch.sin(torch.exp(t)), lambda t: mpmath.sin(mpmath.exp(t))),
    "log1p(x²)": (lambda t: torch.log1p(t * t), lambda t: mpmath.log(1 + t * t)),
    "erf": (torch.erf, mpmath.erf),
    "1/(2+cos)": (lambda t: 1 / (2 + torch.cos(t)), lambda t: 1 / (2 + mpmath.cos(t))),
}


@pytest.mark.parametrize("name", ELEMENTARY)
def test_elementary_functions_match_mpmath(name: str) -> None:
    function, exact = ELEMENTARY[name]
    x, v, order = 0.3, 1.7, 5
    with mpmath.workdps(40):
        coefficients = mpmath.taylor(lambda t: exact(x + v * t), 0, order)
        expected = [float(c * math.factorial(k)) for k, c in enumerate(coefficients)]
    actual = directional_derivatives(
        function, torch.tensor(x, dtype=torch.float64), torch.tensor(v, dtype=torch.float64), order=order
    )
    for derivative, value in zip(actual, expected, strict=True):
        assert derivative.item() == pytest.approx(value, rel=1e-11, abs=1e-11)


@pytest.mark.parametrize("case", CASES, ids=lambda each: each.name)
def test_value_and_first_two_orders_match_references(case: Case) -> None:
    x, args = case.inputs()
    v = case.vector()
    value, first, second = directional_derivatives(case.function, x, v, *args, order=2)
    torch.testing.assert_close(value, case.function(x, *args), rtol=1e-14, atol=1e-14)
    known, direction = reference(case.name), ravel(v)
    known.check(second, direction @ known.hessian @ direction, scale=direction.abs().sum().item() ** 2)
    f, flat = flat_function(case, x, args), ravel(x)
    h = 1e-5
    slope = (f(flat + h * direction) - f(flat - h * direction)) / (2 * h)
    torch.testing.assert_close(first, slope, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["mlp", "tied", "nested", "embedding"])
def test_third_and_fourth_order_match_differences(name: str) -> None:
    """D³f is the slope of t ↦ D²f(x + t v)[v, v], and D⁴f its second difference."""
    case = named(name)
    x, args = case.inputs()
    v, flat = case.vector(), ravel(x)

    def curvature(point: Tensor) -> Tensor:
        return directional_derivatives(case.function, unravel(point, x), v, *args, order=2)[2]

    *_, third, fourth = directional_derivatives(case.function, x, v, *args, order=4)
    h = 1e-4
    slope = (curvature(flat + h * ravel(v)) - curvature(flat - h * ravel(v))) / (2 * h)
    torch.testing.assert_close(third, slope, rtol=1e-5, atol=1e-5)
    expected, error = second_differences(curvature, flat, ravel(v)[None], step=0.02)
    assert error.item() < 1e-5
    torch.testing.assert_close(fourth, expected[0], rtol=1e-5, atol=1e-5)


def test_result_has_the_structure_of_the_output() -> None:
    def f(x: dict[str, Tensor], gain: float) -> dict[str, Any]:
        return {"vector": gain * x["a"] ** 2, "rest": (x["a"].sum() * x["b"], x["b"] ** 3)}

    x, v = {"a": draw(2), "b": draw()}, {"a": draw(2, seed=1), "b": draw(seed=2)}
    derivatives = directional_derivatives(f, x, v, 2.0, order=3)
    for derivative in derivatives:
        assert_same_structure(derivative, f(x, 2.0))
    torch.testing.assert_close(derivatives[2]["vector"], 4 * v["a"] ** 2)
    torch.testing.assert_close(derivatives[2]["rest"][0], 2 * v["a"].sum() * v["b"])
    torch.testing.assert_close(derivatives[3]["rest"][1], 6 * v["b"] ** 3)
    assert not derivatives[3]["vector"].any()


def test_constant_output_has_zero_derivatives() -> None:
    x = draw(3)
    constant = torch.ones(2, dtype=torch.float64)
    derivatives = directional_derivatives(lambda y: {"y": y**2, "c": constant + 0}, x, x, order=2)
    assert derivatives[0]["c"].equal(constant)
    assert derivatives[1]["c"].equal(torch.zeros_like(constant))
    assert derivatives[2]["c"].equal(torch.zeros_like(constant))


def test_float32_matches_float64() -> None:
    x, v = draw(5).float(), draw(5, seed=1).float()
    actual = directional_derivatives(lambda y: torch.tanh(y).prod(), x, v, order=3)
    exact = directional_derivatives(lambda y: torch.tanh(y).prod(), x.double(), v.double(), order=3)
    for derivative, truth in zip(actual, exact, strict=True):
        assert derivative.dtype == torch.float32
        assert (derivative.double() - truth).abs() <= 1e-5 * max(1.0, truth.abs().item())


def test_python_numbers_do_not_promote_dtype() -> None:
    """Derivatives stay float32, although torch's forward mode makes the tangent of 0.5 * x.sum() float64."""
    x = torch.ones(2)
    derivatives = directional_derivatives(lambda y: 0.5 * (y * y).sum(), x, x, order=3)
    assert {derivative.dtype for derivative in derivatives} == {torch.float32}
    assert [derivative.item() for derivative in derivatives] == [1, 2, 2, 0]


def test_composes_with_vmap_and_grad() -> None:
    """D²(Σy³)[v, v] = 6 Σ y v² is right under vmap over y, and differentiated in y and in v."""
    x, v = draw(3), draw(3, seed=1)

    def curvature(y: Tensor, u: Tensor) -> Tensor:
        return directional_derivatives(lambda z: (z**3).sum(), y, u, order=2)[2]

    points = draw(4, 3, seed=2)
    torch.testing.assert_close(torch.func.vmap(curvature, (0, None))(points, v), 6 * (points * v**2).sum(1))
    torch.testing.assert_close(torch.func.grad(curvature)(x, v), 6 * v**2)
    torch.testing.assert_close(torch.func.grad(curvature, 1)(x, v), 12 * x * v)
    leaf = v.clone().requires_grad_()
    curvature(x, leaf).backward()
    torch.testing.assert_close(leaf.grad, 12 * x * v)
    assert not curvature(x, v).requires_grad
    with torch.no_grad():
        torch.testing.assert_close(curvature(x, v), 6 * (x * v**2).sum())


# A sine with a rule for reverse mode and none for forward mode
Sine = custom("Sine", lambda x: torch.sin(x), lambda ctx, g: g * torch.cos(ctx.saved_tensors[0]))


class KeepingItsSlope(Sine):
    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.slope = torch.cos(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient * ctx.slope


@pytest.mark.parametrize("order", [0, 1, 2, 3])
@pytest.mark.parametrize("output", [torch.sum, torch.clone])
def test_function_without_jvp_is_differentiated(output: Any, order: int) -> None:
    x, v = draw(4), draw(4, seed=1)
    found = directional_derivatives(lambda x: output(Sine.apply(x)), x, v, order=order)
    expected = (x.sin(), x.cos() * v, -x.sin() * v**2, -x.cos() * v**3)
    torch.testing.assert_close(found, tuple(output(each) for each in expected[: order + 1]))


def test_function_that_saves_its_slope_in_forward_is_rejected() -> None:
    x, v = draw(4), draw(4, seed=1)
    slope = directional_derivatives(KeepingItsSlope.apply, x, v, order=1)[1]
    torch.testing.assert_close(slope, x.cos() * v)
    with pytest.raises(
        RouteError, match=r"(?s)forward: KeepingItsSlope: .*Taylor mode: KeepingItsSlope\.backward .*slope"
    ):
        directional_derivatives(KeepingItsSlope.apply, x, v, order=2)


def test_random_numbers_are_drawn_once() -> None:
    x = draw(4)
    torch.manual_seed(0)
    value, slope = directional_derivatives(lambda x: Sine.apply(x * torch.rand(4, dtype=torch.float64)), x, x, order=1)
    torch.manual_seed(0)
    y = x * torch.rand(4, dtype=torch.float64)
    torch.testing.assert_close((value, slope), (y.sin(), y * y.cos()))
