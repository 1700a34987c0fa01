"""Diagnosis of failed comparisons and causes, against the expected codes of findings."""

from checks.report_parts import entry

from hodiff.checks import Report
from hodiff.checks.findings.codes import CODES
from hodiff.checks.findings.diagnosis import MESSAGES, OTHER_FAILURES, diagnose
from hodiff.checks.probes.cause import Cause, by_reverse, no_entry


def test_entries_with_one_message_make_one_finding():
    rows = [entry(route, k, "q", None, "raises", "E: no") for k, route in ((1, "a"), (2, "b"), (2, "a"))]
    (finding,) = diagnose(rows)
    assert (finding.route, finding.order, finding.kind) == ("a, b", 1, "raises")
    assert (finding.code, finding.message) == ("HD408", "E: no")


def test_entries_of_one_route_and_order_make_one_finding():
    rows = [
        entry("reverse-over-reverse", 2, "vs differences", 1.0, "zero"),
        entry("reverse-over-reverse", 2, "curved loss", 0.5, "wrong"),
        entry("forward-over-reverse", 2, "vs differences", 1e-9),
    ]
    (finding,) = diagnose(rows)
    assert (finding.code, finding.route, finding.kind) == ("HD115", "reverse-over-reverse", "zero")
    assert "1.0e+00" in finding.message
    assert "curved loss" in finding.message


def test_cause_explains_its_consequences():
    rows = [
        entry("reverse", 1, "vs differences", 1.0, "wrong"),
        entry("reverse-over-reverse", 2, "vs differences", 0.5, "wrong"),
        entry("gradcheck", 1, "reverse", None, "fails", "GradcheckError: mismatch"),
        entry("vmap of values", 0, "all inputs", 1.0, "wrong"),
    ]
    cause = Cause("HD101", ("a factor",), by_reverse, "file.py:3", needs_symptom=True)
    wrong, batching = diagnose(rows, [cause])
    assert (wrong.code, wrong.order, wrong.location, wrong.evidence[0]) == ("HD101", 1, "file.py:3", "a factor")
    assert wrong.route == "reverse, reverse-over-reverse, gradcheck"
    assert batching.code == "HD402"


def test_cause_that_needs_a_symptom_is_dropped_without_it():
    assert diagnose([], [Cause("HD104", ("a detach",), by_reverse, needs_symptom=True)]) == ()
    missing = entry("reverse", 1, "q", None, "raises", "You must implement the jvp function")
    (finding,) = diagnose([missing], [Cause("HD104", ("a detach",), by_reverse, needs_symptom=True)])
    assert finding.code == "HD401"


def test_unwritten_memory_suppresses_kink_findings():
    """Uninitialized memory has arbitrary values, so NaN, or differences that do not converge, are no second fault."""
    rows = [
        entry("reverse-over-reverse", 2, "curved loss", 1e-3, "wrong"),
        entry("forward-over-forward", 2, "curved loss", 1e-3, "non-smooth", "differences do not settle"),
        entry("vmap of forward-over-reverse", 2, "samples", None, "non-finite", "3 of 9 elements are not finite"),
    ]
    (finding,) = diagnose(rows, [Cause("HD308", ("never written",), by_reverse)])
    assert finding.code == "HD308"
    assert {each.code for each in diagnose(rows[1:2])} == {"HD901"}


def test_unwritten_memory_suppresses_findings_of_other_routes():
    modes = ("reverse-over-reverse", "reverse-over-forward", "forward-over-forward")
    rows = [entry(route, 2, "vs differences", 0.1, "wrong") for route in modes]
    cause = Cause("HD308", ("never written",), by_reverse)
    for some in (rows, rows[2:]):
        (finding,) = diagnose(some, [cause])
        assert finding.code == "HD308"
    # Wrong numbers that are the same in each call count, and so does a disagreement with another route.
    assert {each.code for each in diagnose(rows[2:], [Cause("HD101", ("a factor",), by_reverse)])} == {"HD101", "HD114"}
    by_routes = [entry("forward-over-forward", 2, "vs routes", 0.1, "wrong")]
    assert {each.code for each in diagnose(by_routes, [cause])} == {"HD308", "HD114"}


def test_errors_are_listed_before_warnings():
    causes = [Cause("HD501", ("waste",), no_entry), Cause("HD304", ("kept",), no_entry)]
    report = Report("f", (), diagnose([], causes))
    assert report.codes == ("HD304", "HD501")
    assert [finding.code for finding in report.warnings] == ["HD501"]
    assert not report.ok
    assert Report("f", (), report.warnings).ok


def test_every_rule_uses_a_known_code():
    assert {rule.code for rule in (*MESSAGES, *OTHER_FAILURES)} <= set(CODES)
    assert {code.severity for code in CODES.values()} == {"error", "warning", "note"}


def test_kink_is_not_a_symptom_of_another_defect():
    rows = [entry("reverse", 1, "q", 1.0, "non-smooth"), entry("reverse-over-reverse", 2, "q", 1.0, "wrong")]
    cause = Cause("HD101", ("a factor",), by_reverse, needs_symptom=True)
    assert [finding.code for finding in diagnose(rows, [cause])] == ["HD901"]
    assert [finding.code for finding in diagnose(rows[1:], [cause])] == ["HD101"]


def test_cut_graph_explains_small_gradient_errors_only():
    cut = Cause("HD104", ("backward turns gradients off",), no_entry)
    assert [each.code for each in diagnose([entry("reverse", 1, "vs differences", 1e-6, "wrong")], [cut])] == ["HD104"]
    found = diagnose([entry("reverse", 1, "vs differences", 1e-1, "wrong")], [cut])
    assert [each.code for each in found] == ["HD101", "HD104"]
