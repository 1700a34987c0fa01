"""Tests of mixed partial derivatives and derivative tensors, against SymPy."""

import itertools
import math
from collections import Counter

import pytest
import sympy
import torch
from mpmath_series import D

import hodiff
from hodiff.taylor import derivative_tensor
from hodiff.taylor.differential.polarization import interpolated, polarised
from hodiff.taylor.jets import Jet

SYMBOLS = sympy.symbols("a b c e")
FORMULA = sympy.sin(SYMBOLS[0] * SYMBOLS[1]) * sympy.exp(SYMBOLS[2] / 2) + SYMBOLS[3] ** 3 * SYMBOLS[0] ** 2 / (
    1 + SYMBOLS[1] ** 2
)
F = sympy.lambdify([SYMBOLS], FORMULA, modules={"sin": torch.sin, "exp": torch.exp})
X = torch.tensor([0.3, 0.7, -0.4, 1.2], dtype=D)
COORDINATES = [
    *((0,), (2, 2), (0, 1), (3, 0, 3), (0, 1, 2), (0, 0, 1, 1), (3, 1, 3, 3), (0, 1, 2, 3), (1,) * 5, (1, 0, 1, 0, 2)),
    (0, 0, 0, 1, 1, 1),
]


def exact(coordinates, x=X):
    """Compute a partial derivative by SymPy."""
    derivative = sympy.diff(FORMULA, *(SYMBOLS[i] for i in coordinates))
    return torch.tensor(float(derivative.subs(dict(zip(SYMBOLS, x.tolist(), strict=True)))), dtype=D)


def batch(p):
    """Apply F to each row."""
    return F(list(p.unbind(-1)))


@pytest.mark.parametrize("coordinates", COORDINATES)
def test_partial_matches_sympy(coordinates):
    torch.testing.assert_close(hodiff.partial(F, coordinates)(X), exact(coordinates), rtol=1e-12, atol=1e-12)


def test_list_of_partials_matches_sympy():
    found = hodiff.partial(F, COORDINATES)(X)
    assert isinstance(found, list)
    for coordinates, each in zip(COORDINATES, found, strict=True):
        torch.testing.assert_close(each, exact(coordinates), rtol=1e-12, atol=1e-12)
    in_groups = hodiff.partial(F, COORDINATES, chunk_size=3)(X)
    torch.testing.assert_close(in_groups, found)
    assert hodiff.partial(F, [])(X) == []


@pytest.mark.parametrize(
    ("coordinates", "lines"),
    [
        ((0, 0, 0, 0), 1),
        ((0, 1), 2),
        ((0, 1, 2), 4),
        ((0, 0, 1, 1), 4),
        ((0, 1, 1, 1), 4),
        ([(0,), (0, 0), (0, 0, 0), (1,), (1, 1)], 2),
        ([(0, 1), (0, 0), (1, 1)], 3),
        # All ten derivatives of third order in three coordinates share ten lines.
        (list(itertools.combinations_with_replacement(range(3), 3)), 10),
    ],
)
def test_partial_takes_few_directions(coordinates, lines):
    seen = []

    def f(x):
        if isinstance(x, Jet):
            seen.append(x.frame.directions)
        return F(x)

    hodiff.partial(f, coordinates)(X)
    assert seen == [lines]


@pytest.mark.parametrize("scheme", [polarised, interpolated])
@pytest.mark.parametrize("exponents", [(1,), (4,), (1, 2), (2, 2), (1, 1, 1), (3, 1, 2), (1, 1, 1, 1)])
def test_direction_factors_are_exact(scheme, exponents):
    """Factors of monomials give the product of factorials for the derivative's own exponents, and 0 otherwise."""
    order = sum(exponents)
    for powers in itertools.product(range(order + 1), repeat=len(exponents)):
        if sum(powers) == order:
            # D^d of a monomial along s is d! times its value at s.
            total = sum(
                factor * math.factorial(order) * math.prod(s**p for s, p in zip(line, powers, strict=True))
                for line, factor in scheme(exponents).items()
            )
            assert total == (math.prod(map(math.factorial, exponents)) if powers == exponents else 0)


def test_partial_of_a_batch_matches():
    x = torch.stack([X, X + 0.1, X - 0.2])
    found = hodiff.partial(batch, [(0, 1, 2), (3, 3)], batched=True)(x)
    for coordinates, each in zip([(0, 1, 2), (3, 3)], found, strict=True):
        torch.testing.assert_close(each, torch.stack([exact(coordinates, row) for row in x]))
    torch.testing.assert_close(torch.func.vmap(hodiff.partial(F, (0, 1, 2)))(x), found[0])
    single = hodiff.partial(batch, (0, 1, 2), batched=True)(x.float())
    torch.testing.assert_close(single.double(), found[0], rtol=1e-5, atol=1e-6)


def test_coordinates_may_be_indices_or_tuples():
    square = X.reshape(2, 2)
    of_matrix = lambda x: F(x.reshape(4))  # noqa: E731
    for coordinates in ((0, 3, 3), ((0, 0), (1, 1), (1, 1)), (0, 3, -1), ((0, 0), (1, -1), 3)):
        torch.testing.assert_close(hodiff.partial(of_matrix, coordinates)(square), exact((0, 3, 3)))
    tree = {"a": X[:1], "b": X[1:]}
    of_tree = lambda s, x, *, t: {"u": s * F(torch.cat((x["a"], x["b"]))) * torch.ones(t, dtype=D)}  # noqa: E731
    found = hodiff.partial(of_tree, (0, 3, 3), argnums=1)(2.0, tree, t=3)
    torch.testing.assert_close(found, {"u": 2 * exact((0, 3, 3)).expand(3)})


def test_partial_is_differentiable_by_parameters():
    k = torch.tensor([0.3, -0.8], dtype=D, requires_grad=True)
    found = hodiff.partial(lambda x: torch.exp(x @ k), (0, 1, 1))(X[:2])
    closed = k[0] * k[1] ** 2 * torch.exp(X[:2] @ k)
    torch.testing.assert_close(torch.autograd.grad(found, k), torch.autograd.grad(closed, k))


@pytest.mark.parametrize("order", [1, 2, 3, 4])
@pytest.mark.parametrize("chunk_size", [None, 4])
def test_derivative_tensor_matches_sympy(order, chunk_size):
    found = derivative_tensor(F, order, chunk_size=chunk_size)(X)
    assert found.shape == (4,) * order
    for coordinates in itertools.combinations_with_replacement(range(4), order):
        right = exact(coordinates)
        for permuted in set(itertools.permutations(coordinates)):
            torch.testing.assert_close(found[permuted], right, rtol=1e-12, atol=1e-12)


def test_derivative_tensor_of_matrices_matches():
    x, A = X.reshape(2, 2), torch.arange(12, dtype=D).reshape(3, 2, 2) / 10
    f = lambda x: torch.exp((A * x).sum((-1, -2)))  # noqa: E731
    right = torch.einsum("o,oij,okl,omn->oijklmn", f(x), A, A, A)
    torch.testing.assert_close(derivative_tensor(f, 3)(x), right)
    points = torch.stack([x, -x])
    mapped = torch.func.vmap(derivative_tensor(f, 2))(points)
    torch.testing.assert_close(mapped[1], torch.einsum("o,oij,okl->oijkl", f(-x), A, A))
    single = derivative_tensor(lambda x: torch.exp((A.float() * x).sum((-1, -2))), 3)(x.float())
    torch.testing.assert_close(single.double(), right, rtol=1e-5, atol=1e-5)


def test_gradient_of_derivative_tensor_is_the_next_order():
    second = derivative_tensor(F, 2)
    torch.testing.assert_close(torch.func.jacrev(second)(X), derivative_tensor(F, 3)(X))


def test_derivative_tensor_beyond_the_degree_is_zero():
    cubic = lambda x: x[0] ** 2 * x[1]  # noqa: E731
    assert Counter(derivative_tensor(cubic, 3)(X[:2]).flatten().tolist()) == {0.0: 5, 2.0: 3}
    assert not derivative_tensor(cubic, 4)(X[:2]).abs().max() > 1e-14
    assert derivative_tensor(lambda x: x.sum(), 2)(X[:0]).shape == (0, 0)


def test_rejects_bad_arguments():
    tree = {"a": X[:1], "b": X[1:]}
    for call, words in (
        (lambda: hodiff.partial(F, 3), r"partial: coordinates: expected a tuple of ints .* got 3; write \(i,\)"),
        (lambda: hodiff.partial(F, ()), "partial: coordinates: expected a tuple of ints"),
        (lambda: hodiff.partial(F, [0, 1]), "partial: coordinates: .* got 0;"),
        (lambda: hodiff.partial(F, (0, True)), "partial: coordinates: expected a tuple of ints"),
        (lambda: hodiff.partial(F, (0, 4))(X), r"expected an entry of argument 0, of 4 in shape \(4,\), got 4"),
        (lambda: hodiff.partial(F, (-5,))(X), "got -5"),
        (lambda: hodiff.partial(F, ((0, 1),))(X), r"got \(0, 1\); a list of tuples asks for several"),
        (lambda: hodiff.partial(batch, (4,), batched=True)(X.expand(3, 4)), r"\(4,\) at a point, got 4"),
        (lambda: hodiff.partial(lambda x: x["a"], ((0,),))(tree), "expected ints for an argument of 2 tensors"),
        (lambda: hodiff.partial(F, (0,), chunk_size=0), "partial: chunk_size"),
        (lambda: derivative_tensor(F, 0), "derivative_tensor: order: expected an int of 1 or more, got 0"),
        (lambda: derivative_tensor(lambda x: x["a"], 2)(tree), "derivative_tensor: argument 0: expected one tensor"),
    ):
        with pytest.raises(hodiff.InputError, match=words):
            call()
