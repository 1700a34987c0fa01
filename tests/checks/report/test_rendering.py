"""Reports as text, HTML and JSON have the same content, and their HTML is valid inside a page."""

import io
import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from checks.report_parts import Terminal

from hodiff import InputError
from hodiff.checks import Entry, Finding, Report
from hodiff.checks.attempts import first_line
from hodiff.checks.findings.codes import CODES

ROOT = Path(__file__).resolve().parents[3]

ENTRIES = (
    Entry("reverse", 1, "vs differences", 1e-12, 1e-8, "ok"),
    Entry("reverse", 1, "vs routes", 0.0, 1e-8, "ok"),
    Entry("forward", 1, "vs differences", 1.0, 1e-8, "wrong"),
    Entry("forward", 1, "vs routes", None, None, "skipped", "no forward"),
    Entry("reverse-over-reverse", 2, "vs differences", math.inf, 1e-8, "non-finite"),
    Entry("reverse-over-forward", 2, "vs differences", math.nan, math.inf, "non-finite"),
)
CUT = Finding(
    "reverse-over-reverse",
    2,
    "zero",
    "relative error 1.0e+00, tolerance 3.0e-08",
    CODES["HD104"].remedy,
    code="HD104",
    severity="error",
    title=CODES["HD104"].title,
    cause="backward detaches the saved tensor 0 <x>.",
    evidence=("argument 0", "relative error 1.0e+00", "saved tensor 0", "12 bytes"),
    location="functions.py:12",
)
WASTE = replace(CUT, code="HD501", severity="warning", title="gradients that nobody needs", kind="seen", location="")
SURROGATE = replace(CUT, code="HD902", severity="note", title="derivatives of a surrogate", kind="seen", location="")
REPORT = Report("f<T> & g at float64[3]", ENTRIES, (SURROGATE, WASTE, CUT), ("a <b> note",))

ANSI = re.compile(r"\x1b\[[0-9;]*m")


class Checker(HTMLParser):
    """Collects text; raises on elements that are not closed and on external resources."""

    def __init__(self):
        super().__init__()
        self.open, self.text, self.attributes = [], [], []

    def handle_starttag(self, tag, attrs):
        assert tag not in {"script", "link", "img", "style", "iframe"}
        self.open.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def parsed(html):
    checker = Checker()
    checker.feed(html)
    checker.close()
    assert not checker.open
    return checker


def squeezed(text):
    return " ".join(text.split())


def test_columns_are_aligned_with_their_heads():
    lines = str(REPORT).splitlines()
    assert lines[1:4] == [
        "order  route                 vs differences  vs routes",
        "1      reverse               1.0e-12         0.0e+00",
        "1      forward               1.0e+00 wrong   skipped",
    ]


def test_wide_cell_moves_the_next_column():
    rows = [Entry("reverse", 1, quantity, 1.0, 1e-8, "non-finite") for quantity in ("a", "b")]
    head, row = str(Report("f", (*rows,), ())).splitlines()[1:]
    assert head.index("b") == row.index("1.0e+00", row.index("1.0e+00") + 1)


def test_text_lists_errors_then_warnings_then_notes():
    text = str(REPORT)
    parts = ("errors:", "HD104 the", "warnings:", "HD501 grad", "notes:", "HD902 deri", "note: a <b>")
    places = [text.index(part) for part in parts]
    assert places == sorted(places)
    assert text.splitlines()[0] == "check of f<T> & g at float64[3]: 1 error (HD104), 1 warning (HD501)"


@pytest.mark.parametrize(
    ("findings", "said"),
    [
        ((), "ok"),
        ((SURROGATE,), "ok"),
        ((WASTE,), "ok, 1 warning (HD501)"),
        ((CUT, CUT), "2 errors (HD104)"),
        ((replace(CUT, code=""), WASTE), "1 error, 1 warning (HD501)"),
    ],
)
def test_first_line_counts_findings(findings, said):
    assert str(Report("f", (), findings)).splitlines()[0] == f"check of f: {said}"


def test_finding_text_has_no_repetition():
    expected = [
        "HD104 the graph is cut",
        "    cause: backward detaches the saved tensor 0 <x>.",
        "    [zero] reverse-over-reverse, order 2: relative error 1.0e+00, tolerance 3.0e-08",
        "    evidence: argument 0",
        "    evidence: 12 bytes",
        "    at: functions.py:12",
        f"    remedy: {CODES['HD104'].remedy}",
        "    page: docs/reference/findings.md#hd104-the-graph-is-cut",
    ]
    # Long lines are wrapped.
    assert str(CUT).split() == " ".join(expected).split()


def test_cause_that_contains_the_measurement_is_not_repeated():
    finding = replace(CUT, cause=f"backward detaches x: {CUT.message}.")
    assert "    [zero] reverse-over-reverse, order 2" in str(finding).splitlines()
    assert str(finding).count(CUT.message) == 1
    assert "[seen]" not in str(replace(finding, kind="seen"))
    assert "[seen] reverse-over-reverse, order 2: other" in str(replace(finding, kind="seen", message="other"))


@pytest.mark.parametrize("code", CODES.values(), ids=CODES.keys())
def test_finding_links_to_an_existing_section(code):
    """Each link ends in the anchor of a section's heading."""
    (link,) = re.findall(r"page: (\S+)#(\S+)", str(replace(CUT, code=code.code, title=code.title)))
    headings = re.findall(r"(?m)^## (.*)$", (ROOT / link[0]).read_text())
    assert link[1] in ["-".join(re.findall(r"\w+", re.sub(r"['.]", "", h).lower())) for h in headings]


def test_rendering_wraps_long_sentences_without_loss():
    text = REPORT.render(width=40)
    assert squeezed(text) == squeezed(str(REPORT))
    sentences = text[text.index("errors:") :].splitlines()
    assert all(len(line) <= 40 or " " not in line.strip() for line in sentences)


def test_color_adds_only_escape_codes():
    assert "\x1b" not in str(REPORT)
    coloured = REPORT.render(color=True)
    assert "\x1b[31m" in coloured
    assert ANSI.sub("", coloured) == str(REPORT)


@pytest.mark.parametrize(
    ("stream", "environment", "coloured"),
    [
        (Terminal, {}, True),
        (Terminal, {"NO_COLOR": "1"}, False),
        (Terminal, {"NO_COLOR": ""}, True),
        (Terminal, {"TERM": "dumb"}, False),
        (io.StringIO, {}, False),
    ],
)
def test_print_colors_terminals_only(stream, environment, coloured, monkeypatch):
    for name, value in ({"TERM": "xterm", "NO_COLOR": ""} | environment).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("COLUMNS", "300")
    file = stream()
    REPORT.print(file)
    assert ("\x1b" in file.getvalue()) is coloured
    assert ANSI.sub("", file.getvalue()) == str(REPORT) + "\n"


def test_print_writes_to_stdout_by_default(capsys):
    REPORT.print()
    assert capsys.readouterr().out == str(REPORT) + "\n"


def test_html_contains_the_text():
    said = "".join(parsed(REPORT._repr_html_()).text)
    for part in ("f<T> & g", "saved tensor 0 <x>.", "a <b> note", "1.0e+00 wrong", "inf non-finite", "HD104"):
        assert part in said
    assert "return g * slope(x)" in said


def test_html_is_self_contained_and_sets_no_text_colour():
    attributes = parsed(REPORT._repr_html_()).attributes
    assert {name for name, _ in attributes} <= {"style", "open"}
    styles = " ".join(value for name, value in attributes if name == "style")
    assert "url(" not in styles
    # A fixed text colour would be unreadable on a dark or on a light page.
    assert set(re.findall(r"(?<![\w-])color: (\w+)", styles)) == {"inherit"}


@pytest.mark.parametrize("report", [REPORT, Report("sin", ENTRIES[:2], ()), Report("empty", (), ())])
def test_json_round_trips(report):
    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    content = json.loads(report.to_json(), parse_constant=refuse)
    assert (content["schema"], content["version"], content["ok"]) == ("hodiff.report", 1, report.ok)
    assert content["codes"] == list(report.codes)
    back = Report.from_json(report.to_json(indent=2))
    # NaN differs from itself, so reports that contain it are compared by repr.
    assert repr(back) == repr(report)
    assert (back.findings, back.notes) == (report.findings, report.notes)


def test_json_keeps_infinite_and_missing_numbers():
    entries = json.loads(REPORT.to_json())["entries"]
    assert [entry["error"] for entry in entries] == [1e-12, 0.0, 1.0, None, "inf", "nan"]
    assert [entry["tolerance"] for entry in entries] == [1e-8, 1e-8, 1e-8, None, 1e-8, "inf"]


def test_json_with_unknown_fields_is_accepted():
    content = json.loads(REPORT.to_json()) | {"machine": "unknown"}
    content["entries"][0]["seconds"] = 0.1
    assert repr(Report.from_json(json.dumps(content))) == repr(REPORT)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected JSON"),
        ("[]", "expected schema"),
        ("{}", "expected schema 'hodiff.report' of version 1, got None"),
        ('{"schema": "hodiff.report", "version": 2}', "of version 2"),
        ('{"schema": "hodiff.report", "version": 1}', "missing"),
        ('{"schema": "hodiff.report", "version": 1, "title": "f", "entries": [{}], "findings": []}', "malformed"),
        ('{"schema": "hodiff.report", "version": 1, "title": "f", "entries": [3], "findings": []}', "malformed"),
    ],
)
def test_invalid_json_is_rejected(text, message):
    with pytest.raises(InputError, match=message):
        Report.from_json(text)


def test_long_messages_end_after_a_word():
    line = first_line(ValueError("words " * 100)).removeprefix("ValueError: ")
    assert len(line) < 245
    assert set(line.split()) == {"words", "…"}
    assert first_line(ValueError("short\nsecond")) == "ValueError: short"
    assert first_line(ValueError("")) == "ValueError"
