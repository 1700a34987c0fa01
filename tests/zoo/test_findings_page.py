"""Each section of the page of findings has a wrong example that gives its code, and a fixed example that does not.

Most wrong examples are also specimens of the zoo, and are checked there.
"""

import pytest
from slow_cases import slow_except
from zoo.page import SECTIONS, TEXTS, blocks, fixed_example, wrong_example
from zoo.wrong.page import NAMES

from hodiff.checks import check
from hodiff.checks.findings.codes import CODES

NOTES = {code for code, each in CODES.items() if each.severity == "note"}
# The first of several codes with the same fixed example.
FIXED = list({blocks(TEXTS[code])[1]: code for code in reversed(CODES)}.values())


def codes(report):
    return {finding.code for finding in report.findings}


def test_every_code_has_a_section():
    headings = [section.partition("\n")[0] for section in SECTIONS]
    assert headings == [f"{code}: {each.title}" for code, each in CODES.items()]


@pytest.mark.parametrize("code", CODES)
def test_remedies_are_not_written_for_the_square_only(code):
    remedy = CODES[code].remedy
    assert "2 * x" not in remedy or "of x²" in remedy


@pytest.mark.one_in(15)
@pytest.mark.parametrize("code", [code for code in CODES if code not in NAMES])
def test_wrong_example_gives_the_code(code):
    function, inputs, options = wrong_example(code)
    report = check(function, inputs, **options)
    assert codes(report) - NOTES == {code} - NOTES, str(report)
    assert code in codes(report)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("code", slow_except(FIXED, FIXED[4::9]))
def test_fixed_example_gives_no_finding(code):
    function, inputs, options = fixed_example(code)
    report = check(function, inputs, **options)
    assert codes(report) <= NOTES - {code}, str(report)
