"""Source lines in findings, against known lines."""

import sys

import torch

from hodiff.checks import source_lines


def test_builtins_have_no_location():
    assert source_lines.class_location(torch.sin) == ""
    assert source_lines.rule_location(int, "backward") == ""
    assert source_lines.mentions(len, "empty") == ""


def test_lines_of_torch_and_hodiff_have_no_location():
    for module in (torch.nn.functional, sys.modules["hodiff.checks.probes.rule_slopes"]):
        assert source_lines.place(module.__file__, 1) == ""
    assert source_lines.place(__file__, 1).endswith("test_source_lines.py:1")
