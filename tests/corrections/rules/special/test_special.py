"""Special functions by every route, at all arguments, against mpmath and SciPy."""

import mpmath
import pytest
import scipy.special
import torch
from corrections.calls import OF_ONE
from slow_cases import slow_except

import hodiff

D = torch.float64
S = torch.special
mpmath.mp.dps = 50
corrected = hodiff.corrected()


def numbers(*values):
    return torch.tensor(values, dtype=D)


def sphere(x):
    return mpmath.sin(x) / x if x else mpmath.mpf(1)


def damped(n):
    return lambda x: mpmath.besseli(n, x) * mpmath.exp(-abs(x))


class Airy:
    """Derivatives of Ai, by SciPy's Ai and Ai', and $Ai'' = x Ai$."""

    def derivative(self, x, order):
        value, slope = scipy.special.airy(x)[:2]
        return {1: slope, 2: x * value, 3: value + x * slope, 4: x * x * value + 2 * slope}[order].item()


class BySciPy:
    """SciPy's derivatives, because mpmath takes seconds for Y and K."""

    def __init__(self, function, n):
        self.function, self.n = function, n

    def derivative(self, x, order):
        return self.function(self.n, x, order).item()


class ScaledSecondKind:
    """Derivatives of e^x K, from an integral that mpmath computes."""

    def __init__(self, n):
        self.n = n

    def derivative(self, x, order):
        def integrand(t):
            rate = mpmath.cosh(t) - 1
            return (-rate) ** order * mpmath.exp(-x * rate) * mpmath.cosh(self.n * t)

        with mpmath.workdps(20):
            end = mpmath.acosh(1 + 60 / mpmath.mpf(x))
            return mpmath.quad(integrand, mpmath.linspace(0, end, 3))


MIDDLE = (0.3, 1.7, 4.9, 5.1, 13.0, 24.0, 26.0, 60.0)
# The reference, and points at which derivatives of orders 1 to 4 are compared
TRUTHS = {
    "bessel_j0": (BySciPy(scipy.special.jvp, 0), (-7.0, 1e-8, *MIDDLE)),
    "bessel_j1": (BySciPy(scipy.special.jvp, 1), (-7.0, 1e-8, *MIDDLE)),
    "bessel_y0": (BySciPy(scipy.special.yvp, 0), (1e-8, *MIDDLE)),
    "bessel_y1": (BySciPy(scipy.special.yvp, 1), (1e-8, *MIDDLE)),
    "modified_bessel_i0": (BySciPy(scipy.special.ivp, 0), (-7.0, 1e-8, *MIDDLE)),
    "modified_bessel_i1": (BySciPy(scipy.special.ivp, 1), (-7.0, 1e-8, *MIDDLE)),
    "modified_bessel_k0": (BySciPy(scipy.special.kvp, 0), (1e-8, *MIDDLE)),
    "modified_bessel_k1": (BySciPy(scipy.special.kvp, 1), (1e-8, *MIDDLE)),
    "scaled_modified_bessel_k0": (ScaledSecondKind(0), (1e-8, *MIDDLE, 1e4)),
    "scaled_modified_bessel_k1": (ScaledSecondKind(1), (1e-8, *MIDDLE, 1e4)),
    "i0": (lambda x: mpmath.besseli(0, x), (-7.0, 1e-8, *MIDDLE, 300.0)),
    "i1": (lambda x: mpmath.besseli(1, x), (-7.0, 1e-8, *MIDDLE, 300.0)),
    "i0e": (damped(0), (-7.0, 1e-3, *MIDDLE, 1e4)),
    "i1e": (damped(1), (-7.0, 1e-3, *MIDDLE, 1e4)),
    "airy_ai": (Airy(), (-60.0, -9.1, -8.9, -2.1, 0.0, 0.9, 1.1, 8.0, 40.0)),
    "spherical_bessel_j0": (sphere, (-7.0, 1e-3, *MIDDLE)),
    "erfcx": (lambda x: mpmath.exp(x * x) * mpmath.erfc(x), (-5.0, 0.0, 2.9, 3.1, 30.0, 1e4)),
    "log_ndtr": (lambda x: mpmath.log(mpmath.erfc(-x / mpmath.sqrt(2)) / 2), (-300.0, -4.3, -4.2, 0.0, 5.0)),
}


def derivative(f, x, order):
    """Derivative by differences with 60 digits: mpmath shares no formula with hodiff."""
    if isinstance(f, (Airy, BySciPy, ScaledSecondKind)):
        return f.derivative(x, order)
    step = mpmath.mpf(10) ** -9 * max(abs(x), 1)
    with mpmath.workdps(60):
        return mpmath.re(mpmath.diff(f, mpmath.mpf(x), order, h=step))


@pytest.mark.one_in(9)
@pytest.mark.parametrize("name", TRUTHS)
def test_derivatives_match_mpmath_and_scipy(name):
    truth, points = TRUTHS[name]
    f, x = corrected(getattr(S, name)), numbers(*points)
    for order in range(1, 5):
        f = along_ones(f)
        expected = numbers(*(derivative(truth, point, order) for point in points))
        torch.testing.assert_close(f(x), expected, rtol=1e-8, atol=1e-14)


def along_ones(f):
    return lambda x: torch.func.jvp(f, (x,), (torch.ones_like(x),))[1]


@pytest.mark.parametrize("name", [name for name in TRUTHS if name.startswith("bessel")])
def test_bessel_derivatives_beyond_five_have_all_digits(name):
    """Torch's kernels, from which torch 2.15 makes derivatives, have seven digits there."""
    truth, points = TRUTHS[name][0], (5.025, 5.4, 7.5, 11.0)
    got = torch.func.vmap(torch.func.grad(corrected(getattr(S, name))))(numbers(*points))
    expected = numbers(*(derivative(truth, point, 1) for point in points))
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize(("name", "order", "value"), [("i1", 3, 0.375), ("i0", 4, 0.375), ("bessel_j1", 3, -0.375)])
def test_derivatives_at_zero_match_series(name, order, value):
    """The values follow from $I_1 = x/2 + x^3/16 + ...$, $I_0 = 1 + x^2/4 + x^4/64$ and $J_1 = x/2 - x^3/16$."""
    f = corrected(getattr(S, name))
    for _ in range(order):
        f = torch.func.grad(f)
    torch.testing.assert_close(f(numbers(0.0)[0]), numbers(value)[0], rtol=1e-13, atol=0)


def chebyshev(by_angle):
    """A polynomial of x by its form in the angle, which is complex for x beyond 1."""
    return lambda n, x: mpmath.re(by_angle(n + mpmath.mpf(1) / 2, mpmath.acos(x)))


POLYNOMIALS = {
    "chebyshev_polynomial_t": chebyshev(lambda k, t: mpmath.cos((k - 0.5) * t)),
    "chebyshev_polynomial_u": chebyshev(lambda k, t: mpmath.sin((k + 0.5) * t) / mpmath.sin(t)),
    "chebyshev_polynomial_v": chebyshev(lambda k, t: mpmath.cos(k * t) / mpmath.cos(t / 2)),
    "chebyshev_polynomial_w": chebyshev(lambda k, t: mpmath.sin(k * t) / mpmath.sin(t / 2)),
    "hermite_polynomial_h": mpmath.hermite,
    "hermite_polynomial_he": lambda n, x: mpmath.hermite(n, x / mpmath.sqrt(2)) / mpmath.sqrt(2) ** n,
    "laguerre_polynomial_l": lambda n, x: mpmath.laguerre(n, 0, x),
    "legendre_polynomial_p": mpmath.legendre,
}
for _letter in "tuvw":
    _plain = POLYNOMIALS[f"chebyshev_polynomial_{_letter}"]
    POLYNOMIALS[f"shifted_chebyshev_polynomial_{_letter}"] = lambda n, x, plain=_plain: plain(n, 2 * x - 1)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", POLYNOMIALS)
@pytest.mark.parametrize("degree", [0, 1, 4, 9])
def test_polynomial_derivatives_match_mpmath(name, degree):
    points = (-1.3, -0.4, 0.25, 0.95, 2.0)
    f, x = corrected(lambda x: getattr(S, name)(x, degree)), numbers(*points)
    for order in range(1, 4):
        f = along_ones(f)
        expected = [derivative(lambda t: POLYNOMIALS[name](degree, t), point, order) for point in points]
        torch.testing.assert_close(f(x), numbers(*expected), rtol=1e-12, atol=1e-10)


def test_polynomial_degrees_may_differ_per_element():
    degrees, x = torch.tensor([0, 1, 5, -2]), numbers(0.3, 0.3, 0.3, 0.3)
    got = torch.func.jacrev(corrected(lambda x: S.legendre_polynomial_p(x, degrees)))(x).diagonal()
    torch.testing.assert_close(got, numbers(0.0, 1.0, *(derivative(lambda t: mpmath.legendre(5, t), 0.3, 1),), 0.0))


def test_derivative_by_a_polynomial_degree_is_rejected():
    n = numbers(3.0).requires_grad_()
    with hodiff.corrected():
        y = S.hermite_polynomial_h(numbers(0.5), n)
        with pytest.raises(hodiff.RouteError, match="n: a polynomial has no derivative with respect to its degree"):
            y.sum().backward()


X = numbers(0.2, 0.9, 3.2)  # torch's values of Bessel functions are too inaccurate beyond 5 for differences
FUNCTIONS = {name: getattr(S, name) for name in TRUTHS} | {
    "torch.i0": torch.i0,
    "method": lambda x: x.i0(),
    "legendre": lambda x: S.legendre_polynomial_p(x, 5),
    "laguerre, degrees": lambda x: S.laguerre_polynomial_l(x, torch.tensor([2, 0, 3])),
    "zeta": lambda x: S.zeta(2.5, x),
    "zeta, orders": lambda x: S.zeta(numbers(2.5, 3.0, 1.5), x),
    "igamma": lambda x: torch.igamma(numbers(0.5, 1.0, 4.5), x),
    "igammac": lambda x: numbers(0.5, 1.0, 4.5).igammac(x),
    "mvlgamma": lambda x: torch.mvlgamma(x + 1, 3),
}


@pytest.mark.one_in(9)
@pytest.mark.parametrize("name", slow_except(FUNCTIONS, list(FUNCTIONS)[::3]))
def test_derivatives_match_differences_by_every_route(name):
    hodiff.assert_differentiable(corrected(FUNCTIONS[name]), X, scipy=False)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", [D, torch.float32])
def test_values_match_torch(name, dtype):
    x = X.to(dtype)
    with hodiff.corrected():
        got = FUNCTIONS[name](x.clone().requires_grad_())
    assert got.requires_grad
    assert torch.equal(got, FUNCTIONS[name](x))


def test_float32_derivatives_have_all_digits():
    for name in ("bessel_y1", "modified_bessel_i0", "airy_ai", "erfcx"):
        f = torch.func.vmap(torch.func.grad(torch.func.grad(corrected(getattr(S, name)))))
        torch.testing.assert_close(f(X.float()), f(X).float(), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("f", [torch.igamma, torch.igammac, S.zeta])
@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacfwd])
def test_derivative_by_an_order_raises_the_error_of_torch(f, transform):
    a, x = numbers(2.5)[0], numbers(1.5)[0]
    with pytest.raises((NotImplementedError, RuntimeError), match="implemented"):
        transform(corrected(f))(a, x)
    by_x = torch.func.grad(corrected(f), argnums=1)
    if f is S.zeta or transform is torch.func.jacfwd:
        with pytest.raises((NotImplementedError, RuntimeError), match="implemented"):
            transform(by_x)(a, x)
    else:
        step, slope = 1e-5, torch.func.grad(f, argnums=1)
        differences = (slope(a + step, x) - slope(a - step, x)) / (2 * step)
        torch.testing.assert_close(transform(by_x)(a, x), differences, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("a", [1.0, 2.0, 3.0])
def test_igamma_derivatives_at_zero_match_closed_form(a):
    """$x^{a-1} e^{-x} / Γ(a)$ and its derivatives: 1, -1, 1; 0, 1, -2; 0, 0, 1."""
    expected = {1.0: (1, -1, 1), 2.0: (0, 1, -2), 3.0: (0, 0, 1)}[a]
    f = corrected(lambda x: torch.igamma(numbers(a)[0], x))
    got = []
    for _ in range(3):
        f = torch.func.grad(f)
        got.append(f(numbers(0.0)[0]).item())
    assert got == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("p", [1, 2, 5])
@pytest.mark.parametrize("name", ["mvlgamma", "multigammaln"])
def test_multivariate_gamma_derivatives_match_mpmath(name, p):
    """Torch's second derivative has nine digits."""
    points = [(p - 1) / 2 + each for each in (2.0**-10, 0.5, 1.4, 30.0, 1e5)]
    f, x = corrected(lambda x: getattr(torch if name == "mvlgamma" else S, name)(x, p)), numbers(*points)
    for order in range(1, 4):
        f = along_ones(f)
        terms = [[mpmath.polygamma(order - 1, point - mpmath.mpf(j) / 2) for j in range(p)] for point in points]
        torch.testing.assert_close(f(x), numbers(*map(sum, terms)), rtol=1e-13, atol=0)


def test_multivariate_gamma_of_other_arguments_matches_torch():
    for x in (torch.tensor([2, 3]), torch.tensor([0.6, -0.4]), numbers(2.0).requires_grad_()):
        torch.testing.assert_close(corrected(torch.mvlgamma)(x, 2), torch.mvlgamma(x, 2), equal_nan=True)
    with pytest.raises(RuntimeError, match="p has to be greater than or equal to 1"):
        corrected(torch.mvlgamma)(numbers(0.5), 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", FUNCTIONS)
def test_third_order_and_vmapped_derivatives_match_differences(name):
    hodiff.assert_differentiable(corrected(FUNCTIONS[name]), X, order=3, scipy=False)


COMPILED = ("bessel_y1", "scaled_modified_bessel_k0", "airy_ai", "legendre", "log_ndtr", "igamma")


@pytest.mark.slow
@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", slow_except(COMPILED, ("scaled_modified_bessel_k0", "igamma")))
def test_compiled_gradients_match(name):
    f = corrected(FUNCTIONS[name])
    torch.compiler.reset()
    x = X.clone().requires_grad_()
    (got,) = torch.autograd.grad(torch.compile(f, fullgraph=True, backend="aot_eager")(x).sum(), x)
    (expected,) = torch.autograd.grad(f(x).sum(), x)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=0)


@pytest.mark.slow
@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["legendre", "bessel_j0"])
def test_compiled_transforms_raise(name):
    """The compiler differentiates the kernel inside the Function, and torch treats the kernel as a constant."""
    gradient = torch.func.vmap(torch.func.grad(corrected(FUNCTIONS[name])))
    torch.compiler.reset()
    with pytest.raises(Exception, match="would be zero"):
        torch.compile(gradient, fullgraph=True, backend="aot_eager")(X)
    torch.compiler.reset()
    torch.testing.assert_close(torch.compile(gradient, backend="aot_eager")(X), gradient(X))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", [*OF_ONE.split(), *POLYNOMIALS, "gammainc", "gammaincc", "zeta"])
def test_aten_operators_share_the_rule_of_their_function(name):
    inputs = (numbers(2.5, 3.0, 1.5),) * (name in {"gammainc", "gammaincc", "zeta"})
    degrees = (3,) * (name in POLYNOMIALS)
    operator, function = getattr(torch.ops.aten, f"special_{name}"), getattr(S, name)
    for f in (operator, operator.default if not degrees else operator.n_scalar):
        got = torch.func.jvp(along_ones(corrected(lambda x, f=f: f(*inputs, x, *degrees))), (X,), (X,))[1]
        expected = torch.func.jvp(along_ones(corrected(lambda x: function(*inputs, x, *degrees))), (X,), (X,))[1]
        assert expected.any()
        torch.testing.assert_close(got, expected)


def test_integers_and_out_are_left_to_torch():
    with hodiff.corrected():
        assert S.bessel_j0(torch.tensor([0])) == 1
        assert S.bessel_j0(numbers(0.0), out=numbers(5.0)) == 1
        assert S.legendre_polynomial_p(2, torch.tensor([1.0])) == 2
