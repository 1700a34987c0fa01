import pytest

from hodiff import CheckError
from hodiff.checks import Entry, Finding, Report
from hodiff.checks.diagnosis import diagnose


def entry(route, order, quantity, error, status="ok", detail=""):
    return Entry(route, order, quantity, error, 1e-8, status, detail)


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


def test_failure_carries_the_whole_text():
    finding = Finding("forward", 1, "wrong", "relative error 1", "mend jvp")
    report = Report("f", (), (finding,))
    assert not report.ok
    assert str(report).startswith("check of f: 1 finding\n[wrong] forward, order 1")
    with pytest.raises(CheckError) as caught:
        report.raise_on_failure()
    assert str(caught.value) == str(report)


def test_one_message_is_one_finding():
    rows = [entry(route, k, "q", None, "raises", "E: no") for k, route in ((1, "a"), (2, "b"), (2, "a"))]
    (finding,) = diagnose(rows)
    assert (finding.route, finding.order, finding.kind) == ("a, b", 1, "raises")
    assert finding.message == "E: no (q)"


def test_one_route_and_order_is_one_finding():
    rows = [
        entry("reverse-over-reverse", 2, "vs differences", 1.0, "zero"),
        entry("reverse-over-reverse", 2, "curved loss", 0.5, "wrong"),
        entry("forward-over-reverse", 2, "vs differences", 1e-9),
    ]
    (finding,) = diagnose(rows)
    assert (finding.route, finding.kind) == ("reverse-over-reverse", "zero")
    assert "1.0e+00" in finding.message
    assert "curved loss" in finding.message
