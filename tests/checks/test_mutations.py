"""`check` finds nearly every mechanical change of a rule that affects derivatives."""

import pytest
import torch
from checks.behaviour import behaviour
from checks.mutants import equivalent, mutants, unchanged

from hodiff.checks import check
from hodiff.errors import InputError
from hodiff.functions import (
    AMax,
    FusedAddReLU,
    Huber,
    LogSumExp,
    ProjectL2Ball,
    ScaleShift,
    SoftThreshold,
    WeightedSum,
    XLogY,
)
from hodiff.functions.activations.gated_derivatives import SiLUCurvature

BACKWARD_JVP_VMAP = ("backward", "jvp", "vmap")
# All mutants take ten minutes: every fourth is tried, and some sixteen of a Function that has two hundred.
EVERY, MOST = 4, 16


def numbers(*values, shape):
    return torch.tensor(values, dtype=torch.float64).reshape(shape)


X = numbers(0.5, -1.2, 2.0, 0.3, shape=(2, 2))
Y = numbers(1.5, 0.4, 0.7, 1.1, shape=(2, 2))
ROW = numbers(0.8, -0.4, shape=(2,))

# Function, rules, point
FUNCTIONS = [
    (SiLUCurvature, ("slope",), (X,)),
    (SoftThreshold, ("slope",), (X, numbers(0.4, 0.9, shape=(2,)))),
    (ScaleShift, ("residuals", "slope"), (X, Y, ROW)),
    (Huber, ("slope",), (X, numbers(0.4, 0.9, shape=(2,)))),
    (XLogY, ("slope",), (X, Y)),
    # The base class of these two makes their rule of vmap.
    (AMax, ("backward", "jvp"), (X, -1)),
    (LogSumExp, ("backward", "jvp"), (X, -1)),
    (ProjectL2Ball, BACKWARD_JVP_VMAP, (X, numbers(0.9, 3.0, shape=(2, 1)), (-1,))),
    (FusedAddReLU, BACKWARD_JVP_VMAP, (X, ROW)),
    (WeightedSum, BACKWARD_JVP_VMAP, (numbers(0.4, -0.9, shape=(2,)), X, ROW)),
]
IDS = [function.__name__ for function, _, _ in FUNCTIONS]


def is_found(function, inputs):
    """Whether a check of second (or rarely third) order fails, or raises on a Function without a value."""
    try:
        return any(not check(function, inputs, order=order, scipy=False).ok for order in (2, 3))
    except InputError:
        return True


def survivors(function, rules, inputs):
    """Return the names of effective mutants that are not found, and the number of effective mutants."""
    expected = behaviour(function, inputs)
    missed, count = [], 0
    tried = list(mutants(function, rules))
    for mutant in tried[:: max(EVERY, len(tried) // MOST)]:
        if equivalent(expected, behaviour(mutant.function, inputs)):
            continue
        count += 1
        if not is_found(mutant.function, inputs):
            missed.append(mutant.name)
    return missed, count


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("function", "rules", "inputs"),
    [
        pytest.param(*row, id=id_, marks=[pytest.mark.slow] * (i % 3 != 0))
        for i, (row, id_) in enumerate(zip(FUNCTIONS, IDS, strict=True))
    ],
)
def test_unchanged_function_passes(function, rules, inputs):
    copied = unchanged(function)
    assert equivalent(behaviour(function, inputs), behaviour(copied, inputs))
    report = check(copied, inputs, order=2, scipy=False)
    assert report.ok, str(report)


@pytest.mark.one_in(12)
@pytest.mark.parametrize(("function", "rules", "inputs"), FUNCTIONS, ids=IDS)
def test_every_function_has_ten_mutants(function, rules, inputs):
    assert len({mutant.name for mutant in mutants(function, rules)}) >= 10


@pytest.mark.slow
@pytest.mark.parametrize(("function", "rules", "inputs"), FUNCTIONS, ids=IDS)
def test_mutants_are_detected(function, rules, inputs):
    missed, count = survivors(function, rules, inputs)
    assert count
    assert not missed
