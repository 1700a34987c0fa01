"""Patterns of torch's own operators contain every nonzero entry of the Jacobian and of the Hessian."""

import contextlib
import warnings

import numpy as np
import pytest
import torch

import hodiff
from hodiff.audit.samples import ILL_POSED, database, samples
from hodiff.errors import HodiffError
from hodiff.sparse import hessian_pattern, jacobian_pattern

# The warnings are from the operators, or about points that are not smooth.
pytestmark = pytest.mark.filterwarnings("ignore")

PARTS = 12
# Sparse layouts have no rules: the pattern of their results is dense, with a warning.
WITHOUT_RULES = {"sparse.mm.reduce", "sparse.sampled_addmm", "to_sparse"}
# torch's own derivative is wrong (it ignores overwriting), or NaN.
WRONG_IN_TORCH = {"as_strided_scatter", "__rpow__"}


def operators(part):
    return [(name, op) for i, (name, op) in enumerate(sorted(database().items())) if i % PARTS == part]


def small_samples(name, op, count, most):
    try:
        found = samples(name, op, count)
    except Exception:  # torch's operator database cannot make some samples here
        return []
    return [each for each in found if 0 < sum(x.numel() for x in each.point) <= most]


def with_ties(x):
    """Return a point with equal numbers and zeros."""
    return x if x.is_complex() else x.clamp(-1, 1).round()


def real(y):
    return y.real * 0.7 + y.imag if y.is_complex() else y


def without_rules(warned):
    return [str(each.message) for each in warned if "no rule for the dependencies" in str(each.message)]


def count_missing(truth, pattern):
    """Count the entries of a matrix, including infinite ones, that a pattern lacks."""
    return int(((truth != 0) & ~np.isnan(truth) & ~pattern).sum())


def rows_of(y, moving):
    """Compute the gradients of elements one by one, since few operators have batched derivatives."""
    for number in y.reshape(-1):
        if number.requires_grad:
            yield torch.autograd.grad(number, moving, retain_graph=True, allow_unused=True, materialize_grads=True)
        else:
            yield [torch.zeros_like(x) for x in moving]


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_jacobian_patterns_are_complete(part):
    compared = 0
    for name, op in operators(part):
        if name in WRONG_IN_TORCH | set(ILL_POSED):
            continue
        for sample in small_samples(name, op, 3, 400):
            f = sample.function(correct=False, seed=0)

            def results(x, f=f):
                return [real(y) for y in f(*x)]

            moving = [x.requires_grad_() for x in sample.point]
            try:
                found = results(moving)
                rows = [] if any(y.numel() > 400 for y in found) else [row for y in found for row in rows_of(y, moving)]
            except (
                IndexError,
                RuntimeError,
                AssertionError,
            ):  # no derivative, a missing device, a wrapper's error
                continue
            truth = np.array([np.concatenate([part_of(x) for x in row]) for row in rows])
            if truth.size == 0:
                continue
            for at_point in (False, True):
                with warnings.catch_warnings(record=True) as warned:
                    warnings.simplefilter("always")
                    pattern = jacobian_pattern(results, tuple(x.detach() for x in moving), at_point=at_point).toarray()
                assert count_missing(truth, pattern) == 0, (name, at_point)
                assert not without_rules(warned) or name in WITHOUT_RULES, (name, without_rules(warned))
            compared += 1
    assert compared > 50


def part_of(x):
    x = x.resolve_conj()
    return (torch.view_as_real(x) if x.is_complex() else x).reshape(-1).numpy(force=True)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_hessian_patterns_are_complete(part):
    compared = 0
    for name, op in operators(part):
        for sample in small_samples(name, op, 2, 60):
            f = sample.function(correct=False, seed=0)

            def loss(x, f=f):
                total = 0.0
                for i, y in enumerate(f(*x)):
                    weights = torch.randn(y.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(i))
                    total = total + (weights * real(y)).sum()
                return total

            truths = []
            for point in (sample.point, tuple(map(with_ties, sample.point))):
                # Constants, and functions without a second derivative, raise.
                with contextlib.suppress(HodiffError, IndexError, RuntimeError, AssertionError):
                    truths.append(hodiff.hessian_matrix(loss, point).numpy())
            if not truths:
                continue
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                pattern = hessian_pattern(loss, sample.point).toarray()
            assert [count_missing(truth, pattern) for truth in truths] == [0] * len(truths), name
            assert not without_rules(warned) or name in WITHOUT_RULES, (name, without_rules(warned))
            compared += 1
    assert compared > 30
