"""Functions of several variables along curves to order 6, against SymPy's power series with exact coefficients."""

import pytest
import sympy as sp
import torch
from mpmath_series import D

from hodiff.taylor import jet

ORDER = 6
T = sp.Symbol("t")
# The curves of three variables, as coefficients from order 0.
CURVES = [
    [sp.Rational(1, 2), 1, sp.Rational(-1, 3), sp.Rational(1, 5), 0, 0, sp.Rational(1, 7)],
    [sp.Rational(3, 4), sp.Rational(-1, 2), sp.Rational(1, 4), 0, sp.Rational(1, 6), 0, 0],
    [sp.Rational(4, 3), sp.Rational(1, 3), 0, sp.Rational(-1, 2), 0, sp.Rational(1, 8), 0],
]
# The function in torch, and in SymPy.
FUNCTIONS = {
    "a polynomial": (lambda x, y, z: (x * y - z) ** 3 + x * x * y, lambda x, y, z: (x * y - z) ** 3 + x**2 * y),
    "a rational one": (lambda x, y, z: (x + y * z) / (1 + x * z), lambda x, y, z: (x + y * z) / (1 + x * z)),
    "waves": (
        lambda x, y, z: torch.sin(x * y) * torch.exp(-z * x) + torch.cos(z),
        lambda x, y, z: sp.sin(x * y) * sp.exp(-z * x) + sp.cos(z),
    ),
    "a radius": (
        lambda x, y, z: torch.linalg.vector_norm(torch.stack((x, y, z))),
        lambda x, y, z: sp.sqrt(x**2 + y**2 + z**2),
    ),
    "an angle": (lambda x, y, z: torch.atan2(y, x) * z, lambda x, y, z: sp.atan(y / x) * z),
    "logarithms": (
        lambda x, y, z: torch.logsumexp(torch.stack((x, y * z)), 0) * torch.log1p(x),
        lambda x, y, z: sp.log(sp.exp(x) + sp.exp(y * z)) * sp.log(1 + x),
    ),
    "a power": (lambda x, y, z: (x + z) ** y, lambda x, y, z: sp.exp(y * sp.log(x + z))),
    "a determinant": (
        lambda x, y, z: torch.linalg.det(torch.stack((x, y, z, x * y, z * z, y, x, z, 2 + x)).reshape(3, 3)),
        lambda x, y, z: sp.Matrix([[x, y, z], [x * y, z**2, y], [x, z, 2 + x]]).det(),
    ),
    "a solution": (
        lambda x, y, z: torch.linalg.solve(torch.stack((2 + x, y, z, 3 + y)).reshape(2, 2), torch.stack((z, x)))[0],
        lambda x, y, z: ((3 + y) * z - y * x) / ((2 + x) * (3 + y) - y * z),
    ),
    "saturation": (
        lambda x, y, z: torch.tanh(x * y) * torch.sigmoid(z - y),
        lambda x, y, z: sp.tanh(x * y) / (1 + sp.exp(y - z)),
    ),
}


def sympys(f):
    """Compute Taylor coefficients in t by symbolic derivatives."""
    curves = [sum(c * T**k for k, c in enumerate(each)) for each in CURVES]
    expression = f(*curves)
    found = []
    for k in range(ORDER + 1):
        found.append(float(expression.subs(T, 0).evalf(30) / sp.factorial(k)))
        expression = sp.diff(expression, T)
    return found


# SymPy is slow for the sixth derivative of these.
LONG = {"waves", "an angle", "logarithms", "a power", "saturation"}


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in LONG else []) for name in FUNCTIONS]
)
def test_series_match_sympy(name):
    f, exact = FUNCTIONS[name]
    primals = [torch.tensor(float(each[0]), dtype=D) for each in CURVES]
    series = [[torch.tensor(float(c), dtype=D) for c in each[1:]] for each in CURVES]
    value, rest = jet(f, tuple(primals), tuple(series), normalized=True)
    expected = torch.tensor(sympys(exact), dtype=D)
    torch.testing.assert_close(torch.stack([value, *rest]), expected, rtol=1e-11, atol=1e-12)
