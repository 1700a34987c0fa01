"""Progress messages of a check: shown on a terminal, and nowhere else."""

import sys

import pytest
import torch
from checks.report_parts import Terminal

import hodiff
from hodiff.checks import progress

X = torch.tensor([0.5, -1.2], dtype=torch.float64)


@pytest.mark.parametrize("f", [torch.sin, torch.nn.Linear(2, 3)], ids=["function", "module"])
def test_terminal_shows_progress(monkeypatch, f):
    monkeypatch.setattr(progress, "DELAY", 0.0)
    monkeypatch.setattr(sys, "stderr", Terminal())
    hodiff.check(f, X, scipy=False)
    text = sys.stderr.getvalue()
    assert f"check of {getattr(f, '__name__', 'Linear')}" in text
    assert "derivatives" in text


def test_no_output_without_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr(progress, "DELAY", 0.0)
    hodiff.check(torch.sin, X, scipy=False)
    assert capsys.readouterr() == ("", "")
