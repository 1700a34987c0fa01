"""Every line in the table of rules to break exists in hodiff."""

from functools import cache
from pathlib import Path

import pytest
from broken_rules import BROKEN, file_of, texts_of

ROOT = Path(__file__).resolve().parents[1]


@cache
def texts() -> dict[Path, str]:
    return texts_of(ROOT)


@pytest.mark.parametrize("row", BROKEN, ids=lambda row: row[0])
def test_broken_line_exists_in_hodiff(row: tuple[str, str, str, tuple[str, ...]]) -> None:
    _, line, wrong, tests = row
    assert file_of(line, texts()).read_text(encoding="utf-8").count(line) >= 1
    assert wrong != line
    assert all((ROOT / each).exists() for each in tests if each.startswith("tests/"))
