"""`check(module, explore=True)`: inputs around the given ones, and the findings there."""

import pytest
import torch
from torch import nn
from zoo.bases import Cube
from zoo.wrong.explored import WrongAtZero

from hodiff.checks import check
from hodiff.checks.exploration.invented_conditions import MODULE_CONDITIONS, invented
from hodiff.checks.mutations.sample import Sample

X = torch.tensor([[0.5, -1.0, 2.0], [0.3, 0.7, -0.4]])


class Applied(nn.Module):
    """A function, scaled by a parameter."""

    def __init__(self, function):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([1.0, 2.0, 0.5]))
        self.function = function

    def forward(self, x):
        return self.function(x) * self.scale


class OfOneRow(Cube):
    """x³, with a wrong backward for a batch of one row."""

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return (2 if len(x) == 1 else 3) * x**2 * g


class OfManyRows(Cube):
    """x³, whose backward is zero beyond 32 rows."""

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * g * (torch.arange(len(x))[:, None] < 32)


def overflows(x):
    """x / 2, whose gradient is zero in bfloat16."""
    return x.to(torch.float32).to(x.dtype) * 0.5 if x.dtype != torch.bfloat16 else x.detach() * 0.5 + 0 * x


def conditions(report):
    return [(each.code, each.condition) for each in report.errors]


@pytest.mark.slow
def test_right_module_has_no_finding():
    report = check(nn.Sequential(nn.Linear(3, 2), nn.Tanh()), X, explore=True)
    assert report.ok, str(report)
    assert report.codes == ()
    (note,) = (each for each in report.notes if each.startswith("explored"))
    tried, counted = (int(word) for word in note.split() if word.isdigit())
    assert tried > 8
    assert counted >= tried - 1, note


@pytest.mark.parametrize(
    ("function", "condition"),
    [
        pytest.param(WrongAtZero.apply, "where an element of input 0 is 0", marks=pytest.mark.slow),
        pytest.param(OfOneRow.apply, "where the first dimension is 1", marks=pytest.mark.slow),
        pytest.param(OfManyRows.apply, "where the first dimension is 33", marks=pytest.mark.slow),
    ],
)
def test_finding_names_its_condition(function, condition):
    assert check(Applied(function), X).ok
    report = check(Applied(function), X, explore=True)
    assert conditions(report) == [("HD101", condition)], str(report)


@pytest.mark.slow
def test_overflow_in_low_precision_is_found():
    assert check(Applied(overflows), X).ok
    report = check(Applied(overflows), X, explore=True)
    assert [each.condition for each in report.errors] == ["in bfloat16"], str(report)


@pytest.mark.slow
def test_rejected_and_fixed_inputs_are_not_counted_as_failures():
    class TwoRows(nn.Module):
        def forward(self, x, other):
            if len(x) != 2 or bool((other == 0).any()):
                raise ValueError("expected two rows, and no zeros beside them")
            return x**2 * other

    report = check(TwoRows(), (X, X + 5), explore=True, fixed=(1,))
    assert report.ok, str(report)
    assert not any("input 1" in each for each in report.notes)


def test_integer_inputs_are_tried_in_other_batch_sizes():
    tokens = torch.tensor([[1, 2, 3], [3, 2, 1]])
    leaves, structure = torch.utils._pytree.tree_flatten((tokens,))
    found = dict(invented(Sample(None, tuple(leaves), structure, (0,)), 0, MODULE_CONDITIONS[:2]))
    assert {words: each.leaves[0].shape[0] for words, each in found.items()} == {
        "where the first dimension is 1": 1,
        "where the first dimension is 33": 33,
    }


@pytest.mark.slow
def test_module_is_left_unchanged():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).train()
    before = {name: each.clone() for name, each in model.state_dict().items()}
    check(model, X, explore=True, order=1)
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
    assert model[0].weight.dtype == torch.float32
