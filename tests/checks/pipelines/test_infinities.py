"""Inputs with infinities, as in masks: finite elements are compared with differences; infinite ones are constants."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hodiff

D = torch.float64
INF = math.inf
BRIEF = {"scipy": False, "vmap": False}


def normal(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)), dtype=D)


def mask():
    found = torch.zeros(3, 4, dtype=D)
    found[0, 2] = found[1, 1] = -INF
    return found


def mask_with_hidden_row():
    """Return a mask with one row of -inf only."""
    found = mask()
    found[2] = -INF
    return found


RIGHT = {
    "softmax": (lambda x: torch.softmax(x, -1), (normal(3, 4) + mask(),)),
    "logsumexp": (lambda x: torch.logsumexp(x, -1), (normal(3, 4) + mask(),)),
    "log_softmax": (lambda x: torch.log_softmax(x, -1), (normal(3, 4) + mask(),)),
    "infinite outputs": (lambda x, m: x**2 + m, (normal(3, 4), mask())),
    "an upper bound": (lambda x, m: torch.minimum(x, m) ** 3, (normal(3, 4), -mask())),
    "attention": (F.scaled_dot_product_attention, (normal(3, 2), normal(4, 2), normal(4, 3), mask())),
    "a hidden row": (
        F.scaled_dot_product_attention,
        (normal(3, 2), normal(4, 2), normal(4, 3), mask_with_hidden_row()),
    ),
    "float32": (lambda x: torch.softmax(x, -1), ((normal(3, 4) + mask()).float(),)),
}


@pytest.mark.one_in(8)
@pytest.mark.parametrize("name", RIGHT)
def test_right_function_passes_and_a_note_counts_infinities(name):
    f, inputs = RIGHT[name]
    report = hodiff.check(f, inputs, **BRIEF)
    assert report.ok, str(report)
    still = sum(int((~each.isfinite()).sum()) for each in inputs)
    assert f"{still} numbers of the inputs are infinite or NaN, and constants here" in report.notes
    # The finite elements were differentiated, not skipped.
    assert {entry.status for entry in report.entries if entry.quantity == "vs differences"} == {"ok"}


def test_finite_inputs_have_no_note_on_infinities():
    assert not any("infinite" in note for note in hodiff.check(torch.sin, normal(3), **BRIEF).notes)


@pytest.mark.slow
def test_wrong_function_beside_infinities_is_found():
    report = hodiff.check(lambda x: torch.softmax(x + x.detach(), -1), normal(3, 4) + mask(), **BRIEF)
    assert report.codes == ("HD104",)


@pytest.mark.slow
def test_torch_alone_is_wrong_at_fully_masked_rows():
    """Torch's safe softmax of a masked row is wrong in reverse-over-forward; hodiff's rule is right."""
    f, inputs = (lambda x, m: torch._safe_softmax(x + m, -1)), (normal(3, 4), mask_with_hidden_row())
    by_torch = hodiff.check(f, inputs, correct=False, **BRIEF)
    assert [(each.code, each.route) for each in by_torch.errors] == [("HD112", "reverse-over-forward")]
    report = hodiff.check(f, inputs, **BRIEF)
    assert report.ok
    assert report.codes == ("HD410",)


class Attends(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, dropout=dropout, batch_first=True)

    def forward(self, x, mask):
        return self.attention(x, x, x, attn_mask=mask, need_weights=False)[0]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_attention_with_masked_rows_passes(dropout):
    causal = torch.zeros(5, 5).masked_fill(torch.ones(5, 5).triu(1).bool(), -INF)
    causal[3] = -INF
    report = hodiff.check(Attends(dropout), (torch.randn(2, 5, 4), causal))
    assert report.ok, str(report)
    assert "65 in inputs" in report.notes[0]
    assert report.notes[1].startswith("14 numbers of the inputs are infinite")


@pytest.mark.one_in(6)
@pytest.mark.parametrize("f", [torch.sin, torch.tanh, lambda x: 2 * x])
@pytest.mark.parametrize("still", [float("nan"), float("inf")])
def test_infinite_and_nan_elements_are_ignored(f, still):
    report = hodiff.check(f, torch.tensor([0.5, still, 2.0], dtype=torch.float64), vmap=False)
    assert report.ok, report
    assert any("infinite or NaN" in note for note in report.notes)
