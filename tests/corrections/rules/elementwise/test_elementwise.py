"""Elementwise functions at 0 and at other points: closed forms, and every route against differences."""

import math

import mpmath
import pytest
import torch
from corrections.against_torch import same_value, tensor
from corrections.contract import Contract
from drawing import normals

import hodiff

D = torch.float64
GENERATOR = torch.Generator().manual_seed(0)

randn = normals(GENERATOR)

COMPLEX = 0.6 + 0.9j
WHOLE = torch.tensor([-2, 0, 3])
POSITIVE, EXPONENT = tensor(0.5, 1.0, 2.0), tensor(0.0, 1.5, -0.5)

CASES = {
    "ldexp": (lambda x: torch.ldexp(x**3, WHOLE), (POSITIVE,)),
    "ldexp of rows": (lambda x: x.ldexp(WHOLE), (randn(2, 3),)),
    "ldexp in place": (lambda x: (x**2).ldexp_(WHOLE), (POSITIVE,)),
    "ldexp of complex numbers": (lambda a, b: torch.ldexp(torch.complex(a, b), WHOLE) ** 2, (randn(3), randn(3))),
    "pow": (torch.pow, (POSITIVE, EXPONENT)),
    "pow at 0": (lambda x: x ** tensor(0.0, 1.0, 2.0, 3.0, 4.0), (torch.zeros(5, dtype=D),)),
    "pow of whole numbers": (lambda x: x.pow(torch.tensor([[0, 2], [3, 2]])), (tensor(0.0, -1.5),)),
    "pow in place": (lambda x, e: (x * x).pow_(e), (POSITIVE, EXPONENT)),
    "pow of complex numbers": (lambda a, b, e: torch.pow(torch.complex(a, b), e), (randn(3), randn(3), EXPONENT)),
    "pow of 0": (lambda e: torch.pow(0, e), (tensor(1.0, 2.5),)),
    "float_power": (torch.float_power, (POSITIVE, EXPONENT)),
    "a complex exponent": (lambda x: x**COMPLEX + torch.pow(x, COMPLEX), (POSITIVE,)),
    "a complex base": (lambda x: COMPLEX**x + torch.pow(COMPLEX, x), (POSITIVE,)),
    "less than a complex number": (lambda x: (COMPLEX - x) * torch.rsub(x, COMPLEX), (POSITIVE,)),
    "complex numbers and lists": (
        lambda x: torch.stack([
            *torch._foreach_pow([x], COMPLEX),
            *torch._foreach_pow(COMPLEX, [x]),
            *torch._foreach_sub([x], [COMPLEX]),
        ]),
        (POSITIVE,),
    ),
    "complex numbers and operators": (
        lambda x: torch.stack([
            torch.ops.aten.pow.Tensor_Scalar(x, COMPLEX),
            torch.ops.aten.pow.Scalar(COMPLEX, x),
            torch.ops.aten.sub.Scalar(x, COMPLEX) * torch.ops.aten.add.Scalar(x, COMPLEX),
        ]),
        (POSITIVE,),
    ),
    "silu of complex numbers": (lambda a, b: torch.nn.functional.silu(torch.complex(a, b)), (randn(3), randn(3))),
    "atan2": (torch.atan2, (randn(2, 3), randn(3))),
    "logit": (lambda x: torch.logit(x, 0.2), (tensor(0.0, 0.1, 0.3, 0.6, 1.0),)),
    "polar": (torch.polar, (tensor(0.0, 0.5, -2.0), randn(3))),
    "linspace": (lambda a, b: torch.linspace(a, b, 4, dtype=D) ** 2, (tensor(0.5)[0], tensor(-1.0)[0])),
    "linspace to a number": (lambda a: torch.linspace(a**2, 2.0, 3, dtype=D), (tensor(0.7)[0],)),
    "linspace from a whole number": (lambda a: torch.linspace(torch.tensor(1), a, 3, dtype=D), (tensor(0.7)[0],)),
    "logspace": (lambda a: torch.logspace(0.3, a, 3, base=2.0, dtype=D), (tensor(0.7)[0],)),
    "sinc": (torch.sinc, (tensor(0.0, 1e-6, 0.4, 0.5, -2.2),)),
    "sinc of complex numbers": (
        lambda a, b: torch.sinc(torch.complex(a, b)),
        (tensor(0.0, 0.3, 2.0), tensor(0.0, 0.1, 0.2)),
    ),
}
# Dynamo does not support complex numbers, in-place writes, and the gradient of a constant tangent.
NOT_COMPILED = {
    "ldexp of rows",
    "linspace",
    "linspace to a number",
    "logspace",
    "polar",
    *(name for name in CASES if "complex" in name or "in place" in name),
    # The correction declines these, and torch's own compiled gradient ends the process.
    *(["ldexp"] if torch.__version__ >= "2.14" else []),
    # Before torch 2.13, forward mode raises where a graph breaks.
    *([name for name in CASES if "pow" in name] if torch.__version__ < "2.13" else []),
}
WRONG = (
    "linspace",
    "a complex exponent",
    "a complex base",
    "logspace",
    "logit",
    "polar",
    "pow",
    "pow at 0",
    "sinc",
    *(["ldexp"] if torch.__version__ < "2.14" else []),
)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("x", [0.0, 1e-9, 1e-3, 0.45, 0.5, 1.0, 2.7, 40.3])
@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_sinc_derivatives_match_mpmath(x, order):
    """The reference has no pole: sinc(x) is the integral of cos(pi x t) over t from 0 to 1."""
    with mpmath.workdps(30):
        pieces = mpmath.linspace(0, 1, int(x) + 4)
        truth = mpmath.quad(
            lambda t: (mpmath.pi * t) ** order * mpmath.cos(mpmath.pi * t * x + order * mpmath.pi / 2), pieces
        )
    derivative = torch.sinc
    for _ in range(order):
        derivative = torch.func.grad(derivative)
    with hodiff.corrected():
        got = derivative(torch.tensor(x, dtype=D))
    assert got.item() == pytest.approx(float(truth), rel=2e-14, abs=1e-15)


@pytest.mark.parametrize("route", hodiff.ROUTES)
def test_pow_mixed_derivatives_match_closed_form(route):
    """The mixed derivative of x^e by x and e is x^(e - 1) (1 + e log x), also at the exponent 0."""
    for x, e in ((2.0, 0.0), (0.5, 3.0), (3.0, -1.0)):
        H = hodiff.hessian_matrix(lambda p: p[0] ** p[1], tensor(x, e), route=route)
        mixed = x ** (e - 1) * (1 + e * math.log(x))
        expected = [[e * (e - 1) * x ** (e - 2), mixed], [mixed, x**e * math.log(x) ** 2]]
        torch.testing.assert_close(H, tensor(*expected), rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("route", hodiff.ROUTES)
def test_polar_derivatives_at_modulus_0_match_closed_form(route):
    """The gradient of r cos(a) + r² sin(a) is (cos(a), 0) at r = 0, and the mixed derivative is -sin(a)."""
    r, a = torch.zeros((), dtype=D), torch.tensor(0.7, dtype=D)

    def f(r, a):
        z = torch.polar(r, a)
        return z.real + r * z.imag

    with hodiff.corrected():
        torch.testing.assert_close(torch.func.grad(f)(r, a), a.cos())
    H = hodiff.hessian_matrix(lambda p: f(p[0], p[1]), torch.stack([r, a]), route=route)
    torch.testing.assert_close(H, torch.stack([torch.stack([2 * a.sin(), -a.sin()]), torch.stack([-a.sin(), 0 * a])]))


@pytest.mark.parametrize("eps", [None, 0.0, 0.2, 0.6])
def test_logit_values_and_gradients_match_torch(eps):
    x = tensor(0.1, 0.2, 0.5, 0.8, 0.95).requires_grad_()
    for f in (torch.logit, torch.Tensor.logit, torch.special.logit):
        expected = f(x, eps)
        with hodiff.corrected():
            got = f(x, eps)
        assert torch.equal(got, expected)
        torch.testing.assert_close(*(torch.autograd.grad(each.sum(), x)[0] for each in (got, expected)))


@pytest.mark.parametrize("dtype", [torch.float32, D, torch.bfloat16, torch.complex128, torch.int64])
def test_values_and_dtypes_match_torch(dtype):
    x = (4 * torch.rand(5, generator=GENERATOR)).to(dtype)
    x[1] = 0
    small = torch.tensor([0, 1, 2, 3, -1])
    for f in (
        lambda: torch.ldexp(x, small),
        lambda: torch.ldexp(x, small.float()),
        lambda: x ** small.clamp(min=0),
        lambda: torch.pow(input=x, exponent=small.float()),
        lambda: torch.pow(0, x),
        lambda: 2**x,
        lambda: x**2,
        lambda: torch.float_power(x, small),
        lambda: torch.sinc(x),
        lambda: torch.pow(x, small.clamp(min=0), out=torch.empty_like(x)),
    ):
        same_value(f, equal_nan=True)


@pytest.mark.parametrize(
    ("dtype", "y", "x"),
    [(torch.float16, 300.0, 400.0), (torch.float16, 1e-3, 2e-3), (torch.float32, 1e20, 2e20), (D, 1e-200, 1e-201)],
)
@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacfwd])
def test_atan2_gradient_survives_overflow_of_squares(dtype, y, x, transform):
    """The derivative of atan2 by y is x / (x² + y²), and by x it is -y / (x² + y²)."""
    y, x = (torch.tensor(each, dtype=dtype) for each in (y, x))
    squares = mpmath.mpf(x.item()) ** 2 + mpmath.mpf(y.item()) ** 2
    expected = [float(x.item() / squares), float(-y.item() / squares)]
    with hodiff.corrected():
        assert torch.equal(torch.atan2(y.requires_grad_(), x).detach(), torch.atan2(y.detach(), x))
        got = [transform(torch.atan2, argnums=i)(y.detach(), x).item() for i in (0, 1)]
    assert got == pytest.approx(expected, rel=8 * torch.finfo(dtype).eps)


# Real parts, or imaginary parts of tan, at which torch's derivatives from the rounded value lose all digits.
FAR = (20 + 0.3j, -21 + 1j, 5.5 - 2j, 0.4 + 0.2j)


@pytest.mark.parametrize(
    ("name", "exact", "points"),
    [
        ("tanh", mpmath.tanh, FAR),
        ("tan", mpmath.tan, [1j * each for each in FAR]),
        ("sigmoid", lambda z: 1 / (1 + mpmath.exp(-z)), FAR),
        ("expm1", mpmath.expm1, [-20 + 0.2j, 0.1 + 0.3j]),
    ],
)
def test_tails_of_complex_functions_keep_their_digits(name, exact, points):
    z = torch.tensor(points, dtype=torch.complex128)
    function, ones = getattr(torch, name), torch.ones_like(z)
    leaf = z.clone().requires_grad_()

    def derivative(z):
        return torch.func.jvp(function, (z,), (ones,))[1]

    with hodiff.corrected():
        value = function(leaf)
        (gradient,) = torch.autograd.grad(value, leaf, ones, create_graph=True)
        (product,) = torch.autograd.grad(gradient, leaf, ones)
        first, second = torch.func.jvp(derivative, (z,), (ones,))
        in_place = getattr(z.clone().requires_grad_() * 1, f"{name}_")()
    assert torch.equal(value, function(z))
    assert torch.equal(in_place, value)
    with mpmath.workdps(60):
        # Gradients are conjugate to the derivatives.
        for order, found in ((1, gradient.conj()), (1, first), (2, product.conj()), (2, second)):
            for point, got in zip(points, found.tolist(), strict=True):
                truth = complex(mpmath.diff(exact, point, order))
                assert abs(got - truth) <= 1e-13 * abs(truth)


# Functions that have a correction, and points outside of their domains.
OUTSIDE = {
    "logit": (torch.logit, (-1e300, -100.5, -0.1, 1.1, 1.5, 1e300)),
    "special.logit": (torch.special.logit, (-1.0, 1.5)),
    "logit_": (lambda x: x.clone().logit_(), (-1.0, 1.5)),
    "sqrt": (torch.sqrt, (-1e300, -1.0)),
    "pow": (lambda x: x**0.5, (-1e300, -1.0)),
    "pow of tensors": (lambda x: torch.pow(x, tensor(0.5)), (-1e300, -1.0)),
    "a power of a negative number": (lambda x: torch.pow(tensor(-2.0), x), (0.5, -1.5)),
    "float_power": (lambda x: torch.float_power(x, 0.5), (-1e300, -1.0)),
    "acosh": (torch.acosh, (-1e300, -2.0, -0.5, 0.0, 0.9)),
    "digamma": (torch.digamma, (-1e300, -5.0, -1.0)),
    "igamma": (lambda x: torch.igamma(tensor(2.0), x), (-2.0, -0.1)),
    "igamma, order": (lambda x: torch.igamma(tensor(-1.5), x), (0.0, 0.5, 5.0)),
    "igammac": (lambda x: torch.igammac(tensor(2.0), x), (-2.0, -0.1)),
    "igammac, order": (lambda x: torch.igammac(tensor(-1.5), x), (0.0, 0.5, 5.0)),
    "zeta": (lambda x: torch.special.zeta(tensor(2.5), x), (-2.5, -0.1)),
    "zeta, order": (lambda x: torch.special.zeta(tensor(0.5), x), (0.5, -5.0, -2.5)),
    "zeta of a number": (lambda x: torch.special.zeta(0.5, x), (0.5, 2.0)),
    "bessel_y0": (torch.special.bessel_y0, (-1e300, -1.0)),
    "bessel_y1": (torch.special.bessel_y1, (-1e300, -1.0)),
    "modified_bessel_k0": (torch.special.modified_bessel_k0, (-1e300, -1.0)),
    "modified_bessel_k1": (torch.special.modified_bessel_k1, (-1e300, -1.0)),
    "scaled_modified_bessel_k0": (torch.special.scaled_modified_bessel_k0, (-1e300, -1.0)),
    "scaled_modified_bessel_k1": (torch.special.scaled_modified_bessel_k1, (-1e300, -1.0)),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_derivatives_are_nan_where_the_value_is(name):
    f, points = OUTSIDE[name]
    for point in points:
        x = torch.tensor([point], dtype=D)
        value, gradient, product = hodiff.value_grad_hvp(lambda x: f(x).sum(), x, torch.ones_like(x))
        assert value.isnan()
        assert gradient.isnan().all()
        assert product.isnan().all()
        (slope,) = hodiff.jacobian(f, mode="forward")(x)
        assert slope.isnan().all()


class TestContract(Contract):
    cases = CASES
    quick, one_in = list(CASES)[::2], 15
    not_compiled = NOT_COMPILED
    # vmap cannot write a batch into an unbatched tensor.
    not_batched = tuple(name for name in CASES if "in place" in name)
    wrong, wrong_one_in, failures = WRONG, 3, {"wrong", "zero", "non-finite"}


@pytest.mark.parametrize("name", ["logaddexp", "logaddexp2", "pow"])
def test_slopes_are_as_accurate_as_the_result_if_dtypes_differ(name):
    x, half = torch.tensor([0.3, 0.5, 1.2], dtype=D), torch.tensor([0.6, 1.0, 2.1], dtype=torch.float16)
    f = getattr(torch, name)
    for route in hodiff.ROUTES:
        found, expected = (
            hodiff.hvp(lambda x, y=y: f(x, y).square().sum(), x, x, route=route) for y in (half, half.double())
        )
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
