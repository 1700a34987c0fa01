"""Each wrong function gets the code of its defect, and no right function gets an error."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from slow_cases import slow_except
from zoo.specimen import right_specimens, wrong_specimens

from hodiff.checks import check
from hodiff.checks.findings.codes import CODES

WRONG, RIGHT = wrong_specimens(), right_specimens()
# A note is not a defect, so no wrong function needs it.
NAMED = {code for code, each in CODES.items() if each.severity != "note"}


def serious_codes(report):
    return {finding.code for finding in report.findings if finding.severity != "note"}


def name_of(specimen):
    return specimen.name


def is_slow(specimen):
    """Return whether a specimen compiles or explores, which takes seconds."""
    explored = specimen.options.get("explore") and specimen.name != "wrong_at_ties"
    return bool(specimen.options.get("compile") or explored)


# The first specimen of each file and code; the page of findings covers each code quickly.
FIRST = {
    (specimen.function.__module__, specimen.codes): specimen for specimen in reversed(WRONG) if not is_slow(specimen)
}.values()


@pytest.mark.one_in(120)
@pytest.mark.parametrize("specimen", slow_except(WRONG, FIRST, name_of))
def test_defect_has_its_code(specimen):
    # SciPy's oracle finds nothing that differences do not find; the test of right functions includes it.
    report = check(specimen.function, specimen.inputs, **{"scipy": False, **specimen.options})
    assert serious_codes(report) == set(specimen.codes), str(report)
    # Non-finite derivatives at an edge are an error if the input is at the edge, and a warning otherwise.
    if specimen.codes != ("HD112",):
        assert report.ok == all(CODES[code].severity != "error" for code in specimen.codes)


@pytest.mark.slow
def test_edge_away_from_the_input_is_a_warning():
    by_name = {each.name: each for each in WRONG}
    for name, ok in (("bump_nearby", True), ("bump_at_zero", False)):
        specimen = by_name[name]
        assert check(specimen.function, specimen.inputs, **specimen.options).ok == ok


def is_checked_elsewhere(specimen):
    """Return whether the contract of the Functions or the tests of the lessons check the specimen."""
    return specimen.name.startswith(("hodiff.", "lesson.")) and "approximate" not in specimen.options


OF_THE_ZOO = [specimen for specimen in RIGHT if not is_checked_elsewhere(specimen)]


@pytest.mark.one_in(40)
@pytest.mark.parametrize("specimen", slow_except(OF_THE_ZOO, OF_THE_ZOO[::3], name_of))
def test_right_function_has_no_error(specimen):
    report = check(specimen.function, specimen.inputs, **specimen.options)
    assert report.ok, str(report)


def test_every_code_has_a_specimen():
    assert {code for specimen in WRONG for code in specimen.codes} == NAMED


def test_zoo_has_forty_wrong_and_sixty_right_functions():
    assert len(WRONG) >= 40
    assert len(RIGHT) >= 60


def test_table_help_states_the_cost_and_the_output():
    table = Path(__file__).parent / "table.py"
    said = subprocess.run([sys.executable, table, "--help"], capture_output=True, text=True, check=True).stdout
    assert "takes minutes" in said
    assert "rewrites docs/reference/zoo.md" in said


@pytest.mark.slow
def test_partial_table_is_printed_and_not_written():
    table = Path(__file__).parent / "table.py"
    command = [sys.executable, table, "bias_of_its_own_shape", "sin"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "| `bias_of_its_own_shape` | HD408: a rule raises | misses it | finds it | n/a | finds it |" in said
    assert "| right functions called wrong |  | 0 of 1 | 0 of 1 | n/a | 0 of 1 |" in said


def test_page_matches_the_zoo():
    """Run `python tests/zoo/table.py` to update the page."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "reference" / "zoo.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|", page, flags=re.MULTILINE)
    listed = {name: tuple(re.findall(r"(HD\d+):", defects)) for name, defects in rows}
    if torch.__version__ >= "2.15":
        del listed["determinant"]
    assert listed == {specimen.name: specimen.codes for specimen in WRONG}
