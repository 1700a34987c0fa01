"""Reference derivatives along a curve, and Laplacians, by nested forward mode."""

import math

import torch
from mpmath_series import D

import hodiff
from hodiff.derivatives.products_by_route import push
from hodiff.taylor import jet
from hodiff.taylor.jets import new_jet
from hodiff.taylor.passes import framed, through


def along_a_curve(f, x, terms):
    """Compute the value and the derivatives of f at x + t x₁ + t² x₂ / 2 + …"""

    def at(t):
        return f(x + sum(c * t**k / math.factorial(k) for k, c in enumerate(terms, start=1)))

    def tower(t, height):
        if height == 0:
            return (at(t),)
        values, slopes, _ = push(lambda t: (tower(t, height - 1), ()), (t,), (torch.ones_like(t),))
        return (*values, slopes[-1])

    with hodiff.corrected():
        return tower(torch.zeros((), dtype=D), len(terms))


def laplacian(f, x):
    """Compute the sum of second derivatives along the axes."""
    axes = torch.eye(x.numel(), dtype=D).reshape(-1, *x.shape)
    return sum(along_a_curve(f, x, [axis, torch.zeros_like(x)])[2] for axis in axes)


def assert_all(f, right, x, terms, **tolerance):
    """Compare series of f (plain, collapsed and in several directions) with derivatives of `right`."""
    value, derivatives = jet(f, (x,), (terms,))
    torch.testing.assert_close((value, *derivatives), along_a_curve(right, x, terms), **tolerance)
    torch.testing.assert_close(hodiff.laplacian(f)(x), laplacian(right, x), **tolerance)
    directions = torch.stack([terms[0], 2 * terms[-1] - terms[0]])
    with framed(2, 2) as frame:
        ((_, first, second),), _ = through(frame, f, (new_jet(frame, [x, directions, None]),))
    for i, direction in enumerate(directions):
        _, slope, curvature = along_a_curve(right, x, [direction, torch.zeros_like(x)])
        # A coefficient None is zero.
        torch.testing.assert_close(torch.zeros_like(slope) if first is None else first[i], slope, **tolerance)
        half = torch.zeros_like(slope) if second is None else second[i]
        torch.testing.assert_close(2 * half, curvature, **tolerance)
