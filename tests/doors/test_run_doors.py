"""The page of tested versions agrees with the requirements of the doors."""

import re

import pytest
from doors import run_doors


@pytest.mark.parametrize("door", run_doors.DOORS)
def test_page_has_the_tested_versions(door):
    lines = (run_doors.HERE / door / "requirements.txt").read_text().split()
    (row,) = re.findall(rf"^\| `{door}` \|.*$", run_doors.PAGE.read_text(), re.MULTILINE)
    pinned = [line.split("==") for line in lines if "==" in line]
    assert pinned
    assert all(f"{name} {version}," in row for name, version in pinned)


def test_a_row_replaces_its_old_one_in_order(tmp_path, monkeypatch):
    page = tmp_path / "doors.md"
    monkeypatch.setattr(run_doors, "PAGE", page)
    page.write_text("# Title\n\n| a | b | |\n|---|---|---|\n| `b` | one | two |\n\nThe end.\n")
    run_doors.write_row("c", "three | four")
    run_doors.write_row("a", "five | six")
    run_doors.write_row("b", "seven | eight")
    rows = "| `a` | five | six |\n| `b` | seven | eight |\n| `c` | three | four |\n"
    assert page.read_text() == f"# Title\n\n| a | b | |\n|---|---|---|\n{rows}\nThe end.\n"
