"""Products and successive powers with zero factors: polynomials by hand, and every route against differences."""

import math

import pytest
import torch
from corrections.against_torch import same_value, tensor
from corrections.contract import Contract

import hodiff

D = torch.float64

ZEROS = tensor(0.0, 2.0, 0.0, 0.0, 0.5)
ROWS = torch.stack([ZEROS, tensor(1.0, 3.0, -0.5, 2.0, 0.2), tensor(0.0, 1.0, 2.0, -1.0, 1.5)])

CASES = {
    "prod": (torch.prod, (ZEROS,)),
    "prod of rows": (lambda x: x.prod(-1), (ROWS,)),
    "prod of columns": (lambda x: torch.prod(x, 0, keepdim=True), (ROWS,)),
    "prod of a number": (lambda x: torch.prod(x**3, 0, keepdim=True), (torch.tensor(0.7, dtype=D),)),
    "prod without zeros": (torch.prod, (ROWS[1],)),
    "prod of complex numbers": (lambda a, b: torch.complex(a, b).prod(), (ZEROS, tensor(0.0, 1.0, 0.0, 0.0, 2.0))),
    "linalg.vander": (lambda x: torch.linalg.vander(x, N=4), (tensor(0.0, -0.5, 2.0),)),
    "linalg.vander of a number": (lambda x: torch.linalg.vander(x, N=3), (torch.tensor(-0.5, dtype=torch.float64),)),
    "vander": (torch.vander, (tensor(0.0, -0.5, 2.0),)),
    "vander increasing": (lambda x: torch.vander(x**2, 3, increasing=True), (tensor(0.0, 2.0),)),
}


@pytest.mark.parametrize("route", hodiff.ROUTES)
def test_derivatives_with_tiny_factors_do_not_overflow(route):
    """The mixed derivative of 4000 x y is 4000, also in 16 bits; that of c x y z at tiny numbers is c z."""
    x = torch.tensor([0.03, 1.0, 1.0, 1.0], dtype=torch.float16)
    assert hodiff.hessian(lambda x: 4000.0 * torch.prod(x), route=route)(x)[0, 1] == 4000
    tiny = tensor(1e-100, 1e-100, 3.0)
    got = hodiff.hessian(lambda x: 1e250 * x.prod(), route=route)(tiny)
    torch.testing.assert_close(got[0, 1], tensor(3e250)[0])


def third(f, x):
    """Yield third derivatives by all eight nestings of forward and reverse mode."""
    for first in (torch.func.jacrev, torch.func.jacfwd):
        for second in (torch.func.jacrev, torch.func.jacfwd):
            for last in (torch.func.jacrev, torch.func.jacfwd):
                yield hodiff.corrected()(last(second(first(f))))(x)


def test_third_derivatives_of_prod_with_zeros_match_closed_form():
    """Third derivatives of a b c d by three different factors are the fourth factor; all others are 0."""
    x = tensor(0.0, 5.0, 0.0, 0.0)
    expected = torch.zeros(4, 4, 4, dtype=D)
    for left in range(4):
        places = [i for i in range(4) if i != left]
        for i in places:
            for j in places:
                for k in places:
                    expected[i, j, k] = x[left] if len({i, j, k}) == 3 else 0.0
    for got in third(torch.prod, x):
        torch.testing.assert_close(got, expected)


def test_third_derivatives_of_vander_at_zero_match_closed_form():
    """The k-th column has the third derivative k (k - 1) (k - 2) x^(k - 3)."""
    x = tensor(0.0)
    expected = tensor(*(math.perm(k, 3) * (k == 3) for k in range(5)))
    for got in third(lambda x: torch.vander(x, 5, increasing=True)[0], x):
        torch.testing.assert_close(got.flatten(), expected)


@pytest.mark.parametrize("dtype", [D, torch.float32, torch.bfloat16, torch.complex64, torch.int64])
def test_values_match_torch(dtype):
    x = ROWS.mul(2).to(dtype)
    for f in (
        lambda: x.prod(),
        lambda: torch.prod(input=x, dim=-1, keepdim=True),
        lambda: x[:, :1].prod(1),
        lambda: x[:, :0].prod(1),
        lambda: torch.prod(x, dtype=torch.complex128),
        lambda: x[0, 0].prod(),
        lambda: torch.prod(x, 1, out=torch.empty_like(x[:, 0])),
        lambda: torch.vander(x[0], N=3),
        lambda: torch.vander(x[0], 0),
        *([lambda: torch.linalg.vander(x), lambda: torch.linalg.vander(x, N=2)] if dtype != torch.bfloat16 else []),
    ):
        same_value(f)


BAD = {
    "prod": lambda x: x.prod(3),
    "prod of a number": lambda x: x[0, 0].requires_grad_().prod(1),
    "linalg.vander": lambda x: torch.linalg.vander(x, N=1),
    "linalg.vander in 16 bits": lambda x: torch.linalg.vander(x.bfloat16()),
    "vander": lambda x: torch.vander(x),
}


class TestContract(Contract):
    cases, one_in = CASES, 6
    # Dynamo raises on the gradient.
    not_compiled = ("prod of complex numbers", "vander", "vander increasing")
    wrong, order_of_failures = ("prod", "prod of rows", "linalg.vander", "vander"), 3
    errors, error_inputs = BAD, (torch.zeros(2, 2),)
