"""Taylor coefficients along curves by nested `torch.func.jvp`, for functions of elementary operators only."""

import math

import torch
from mpmath_series import D

from hodiff.audit.jets.curves import Curves, moves
from hodiff.audit.jets.oracles import by_jets, by_values


def nested(curves, order):
    """Compute coefficients 0 to K of each output; above order 0, the first dimension is the direction."""

    def tower(direction, t, height):
        if height == 0:
            return (curves.along(direction, t),)
        values, slopes = torch.func.jvp(lambda t: tower(direction, t, height - 1), (t,), (torch.ones_like(t),))
        return (*values, slopes[-1])

    rows = [tower(direction, torch.zeros((), dtype=D), order) for direction in range(curves.directions)]
    return [
        [each, *(torch.stack([row[k][i] for row in rows]) / math.factorial(k) for k in range(1, order + 1))]
        for i, each in enumerate(rows[0][0])
    ]


def curves(f, start, order, directions=2, seed=0, size=0.5):
    """Return a function of tensors along random curves; the function may return a single tensor."""
    generator = torch.Generator().manual_seed(seed)
    terms = tuple(torch.randn((order, directions, *x.shape), generator=generator, dtype=D) * size for x in start)

    def function(*xs):
        found = f(*xs)
        return tuple(each for each in (found if isinstance(found, tuple) else (found,)) if moves(each))

    return Curves(function, tuple(start), terms)


def assert_close(found, right, order, *, collapsed=False, rtol=1e-9):
    """Compare jets with coefficients; the highest collapsed coefficient is the sum over the directions."""
    assert len(found) == len(right)
    for own, exact in zip(found, right, strict=True):
        for k in range(order + 1):
            expected = exact[k].sum(0) if collapsed and k == order else exact[k]
            got = torch.zeros_like(expected) if own[k] is None else own[k]
            atol = rtol * (1 + expected.abs().max().item()) if expected.numel() else 0.0
            torch.testing.assert_close(got, expected, rtol=0, atol=atol)


def assert_as_nested(along, order, collapsed_orders=(2,)):
    """Compare plain jets up to an order, and collapsed jets of lower orders, with nested forward mode."""
    right = nested(along, order)
    assert_close(by_jets(along, order), right, order)
    for k in collapsed_orders:
        assert_close(by_jets(along, k, collapsed=True), right, k, collapsed=True)


def assert_as_values(along, order, collapsed_orders=(2,)):
    """Compare jets with interpolated values, which must converge and share no code with any derivative."""
    right = by_values(along, order)
    for each in right:
        for error, number in zip(each.errors, each.numbers, strict=True):
            assert (error <= 1e-7 * (1 + number.abs())).all(), "values do not settle"
    numbers = [each.numbers for each in right]
    assert_close(by_jets(along, order), numbers, order, rtol=1e-6)
    for k in collapsed_orders:
        assert_close(by_jets(along, k, collapsed=True), numbers, k, collapsed=True, rtol=1e-6)
