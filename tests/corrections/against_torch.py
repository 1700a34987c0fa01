"""Comparison of corrected functions with torch's values, errors and differences; tensors in float64 by default."""

from contextlib import nullcontext

import pytest
import torch

import hodiff
from hodiff.checks.comparisons.order_by_order import against_differences, climb
from hodiff.checks.comparisons.scalarize import scalarize

FAILURES = {"wrong", "raises", "non-finite"}


def tensor(*numbers, dtype=torch.float64):
    return torch.tensor(numbers, dtype=dtype)


def unsigned(vectors):
    """Weighted sum of projections on eigenvectors, which does not depend on their signs or phases."""
    return (vectors * torch.arange(1, vectors.shape[-1] + 1, dtype=torch.float64)) @ vectors.mH


def route_statuses(f, inputs, order):
    """Compare with differences, and return the status of each route: 2 routes of order 1, 4 of order 2, 8 of 3."""
    generator = torch.Generator().manual_seed(0)
    problem = scalarize(f, inputs, generator)
    return [entry.status for entry in against_differences(climb(problem, problem.curved_loss, order, generator), order)]


def assert_every_route(f, inputs):
    assert route_statuses(hodiff.corrected()(f), inputs, 3) == ["ok"] * 14


def same_value(f, **options):
    """Check that corrections keep torch's value, its type and its dtype."""
    expected = f()
    with hodiff.corrected():
        got = f()
    assert type(got) is type(expected)
    torch.testing.assert_close(got, expected, **options)


def same_error(f, *inputs, mode=None):
    """Check that corrections keep torch's error and its message."""

    def error(mode):
        with pytest.raises((RuntimeError, ValueError, IndexError, TypeError)) as caught, mode:
            f(*inputs)
        return caught.type, str(caught.value)

    assert error(mode or hodiff.corrected()) == error(nullcontext())
