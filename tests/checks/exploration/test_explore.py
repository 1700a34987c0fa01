"""`explore=True`: inputs around the given one, and the findings there."""

import pytest
import torch
from zoo.bases import Cube, Product, SavesInputs, X, Y
from zoo.wrong.explored import WrongAtZero

from hodiff import Report
from hodiff.checks import check
from hodiff.checks.exploration.invented_conditions import CONDITIONS, invented
from hodiff.checks.mutations.sample import Sample
from hodiff.checks.report.formats import report_html

BRIEF = {"scipy": False, "vmap": False, "order": 1}


@pytest.fixture(scope="module")
def report():
    return check(WrongAtZero, X, explore=True, **BRIEF)


@pytest.mark.slow
def test_finding_names_its_condition(report):
    (finding,) = report.errors
    assert finding.condition == "where an element of input 0 is 0"
    assert finding.evidence[0].startswith("wrong where an element of input 0 is 0, as at [")
    assert "0.0" in finding.evidence[0]
    assert "where input 0 is 0" in finding.evidence[-1]
    assert finding.location.split(":")[0].endswith("explored.py")


def test_text_html_and_json_contain_the_condition(report):
    heading = "HD101 wrong gradient where an element of input 0 is 0"
    assert heading in str(report)
    assert heading in report_html(report)
    assert "#hd101-wrong-gradient" in str(report)
    assert Report.from_json(report.to_json()) == report


def test_note_counts_the_explored_inputs(report):
    assert any("explored 15 inputs around the given one" in note for note in report.notes)


def test_without_explore_no_other_input_is_tried():
    assert check(WrongAtZero, X, **BRIEF).ok


class Rectifier(SavesInputs):
    """max(x, 0), which has no derivative at 0, and whose backward is nan there."""

    @staticmethod
    def forward(x):
        return x.clamp_min(0)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * (x > 0) / (x != 0)

    jvp = staticmethod(lambda ctx, t: t * (ctx.saved_tensors[0] > 0))


@pytest.mark.slow
def test_kinks_are_not_counted_as_failures():
    assert check(Rectifier, X, explore=True, **BRIEF).ok


def test_rejected_inputs_are_not_counted_as_failures():
    def three_numbers(x):
        if x.shape != (3,) or x.dtype != torch.float64 or not bool((x.detach() != 0).all()):
            raise ValueError("expected three numbers other than 0")
        return x**3

    assert check(three_numbers, X, explore=True, **BRIEF).ok


@pytest.mark.slow
def test_error_at_an_explored_input_is_a_warning():
    class NeedsLength(Cube):
        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return 3 * x[: len(x)] ** 2 * g

    report = check(NeedsLength, X, explore=True, **BRIEF)
    assert report.ok
    assert {each.condition for each in report.warnings if each.code == "HD408"} == {"where inputs have no dimensions"}


def test_every_condition_has_a_changed_input_that_meets_it():
    """Two inputs shaped as batches of images allow every condition."""
    x = torch.arange(1.0, 37.0, dtype=torch.float64).reshape(1, 3, 3, 4)
    leaves, structure = torch.utils._pytree.tree_flatten((x, x + 100))
    changed = invented(Sample(torch.add, tuple(leaves), structure, (0, 1)), 0)
    found = dict(reversed(changed))
    words = {words.format(f"input {i}") for words, _ in CONDITIONS for i in range(2)}
    assert set(found) == words
    at_zero = found["where an element of input 1 is 0"]
    assert int((at_zero.leaves[1] == 0).sum()) == 1
    assert torch.equal(at_zero.leaves[0], x)
    assert found["where a size is 33"].leaves[0].shape == (1, 33, 33, 4)
    assert found["where a size is less by one"].leaves[1].shape == (1, 2, 2, 4)
    assert found["where inputs have no dimensions"].leaves[1].shape == ()
    assert found["in bfloat16"].leaves[0].dtype == torch.bfloat16
    expanded = found["where input 0 is expanded"]
    assert 0 in expanded.layouts[0].arrange(expanded.leaves[0]).stride()


def test_each_size_is_1_and_33_and_no_input_is_tried_twice():
    changed = invented(Sample(torch.sin, (torch.arange(6.0).reshape(3, 2),), None, (0,)), 0)
    shapes = [tuple(each.leaves[0].shape) for words, each in changed if "size" in words or "broadcast" in words]
    assert shapes == [(2, 2), (1, 2), (3, 1), (33, 2), (3, 33)]
    square = invented(Sample(torch.det, (torch.arange(9.0).reshape(3, 3),), None, (0,)), 0)
    shapes = [tuple(each.leaves[0].shape) for words, each in square if "size" in words or "broadcast" in words]
    assert shapes == [(2, 2), (1, 1), (33, 33), (1, 3), (3, 1)]


@pytest.mark.slow
@pytest.mark.parametrize(("dim", "size"), [(0, 1), (1, 1), (0, 33), (1, 33)])
def test_backward_wrong_for_one_size_is_found(dim, size):
    class WrongForSize(Cube):
        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return (2 if x.dim() and x.shape[dim] == size else 3) * x**2 * g

    report = check(WrongForSize, torch.arange(1.0, 7.0, dtype=torch.float64).reshape(3, 2), explore=True, **BRIEF)
    assert [(each.code, each.condition) for each in report.errors] == [("HD101", f"where a size is {size}")]


def test_seed_determines_the_explored_inputs():
    leaves, structure = torch.utils._pytree.tree_flatten((X, Y))
    sample = Sample(Product.apply, tuple(leaves), structure, (0, 1))
    first, again = (invented(sample, 3) for _ in range(2))
    assert all(
        torch.equal(a, b)
        for (_, x), (_, y) in zip(first, again, strict=True)
        for a, b in zip(x.leaves, y.leaves, strict=True)
    )
