"""A report's table and failure as text, against text written by hand."""

import pytest
from checks.report_parts import entry

from hodiff import CheckError
from hodiff.checks import Finding, Report


def test_table_is_aligned():
    rows = (
        entry("reverse", 1, "vs differences", 1e-12),
        entry("reverse", 1, "vs routes", 0.0),
        entry("forward", 1, "vs differences", 1.0, "wrong"),
        entry("forward", 1, "vs routes", None, "skipped"),
        entry("vmap", 0, "values", 0.0),
    )
    expected = """\
check of f: ok
order  route    vs differences  vs routes
1      reverse  1.0e-12         0.0e+00
1      forward  1.0e+00 wrong   skipped
order  route    values
0      vmap     0.0e+00"""
    assert str(Report("f", rows, ())) == expected


def test_failed_report_raises_its_whole_text():
    finding = Finding("forward", 1, "wrong", "relative error 1", "mend jvp")
    report = Report("f", (), (finding,))
    assert not report.ok
    assert str(report).startswith("check of f: 1 error\n")
    assert "[wrong] forward, order 1: relative error 1" in str(report)
    with pytest.raises(CheckError) as caught:
        report.raise_on_failure()
    assert str(caught.value) == str(report)
