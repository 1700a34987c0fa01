"""The page of findings: a section a code, whose wrong example gives the code and whose mended one does not."""

import ast
import importlib.util
import re
import sys
from pathlib import Path

import pytest

from hodiff.checks.findings.codes import CODES
from hodiff.checks.torch_warnings import silence_torch_warnings

PAGE = Path(__file__).resolve().parents[2] / "docs" / "findings.md"
INTRODUCTION, *SECTIONS = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
NOTES = {code for code, each in CODES.items() if each.severity == "note"}
TEXTS = {section.partition(":")[0]: section for section in SECTIONS}


def blocks(text):
    return re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def run(source, folder):
    """Import a block as a file, so that its source can be found, and return the value of its last expression."""
    *_, last = ast.parse(source).body
    lines = source.splitlines()
    lines[last.lineno - 1] = "report = " + lines[last.lineno - 1]
    path = folder / "example.py"
    path.write_text("\n".join([*blocks(INTRODUCTION), *lines]), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(f"example_{folder.name}", path)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch, silence_torch_warnings():
        # inspect finds a class's source by its module.
        patch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
    return module.report


def codes(report):
    return {finding.code for finding in report.findings}


def test_every_code_has_its_section():
    headings = [section.partition("\n")[0] for section in SECTIONS]
    assert headings == [f"{code}: {each.title}" for code, each in CODES.items()]


@pytest.mark.parametrize("code", CODES)
def test_wrong_example_gives_the_code(code, tmp_path):
    wrong, _ = blocks(TEXTS[code])
    report = run(wrong, tmp_path)
    assert codes(report) - NOTES == {code} - NOTES, str(report)
    assert code in codes(report)


@pytest.mark.parametrize("code", CODES)
def test_mended_example_gives_none(code, tmp_path):
    _, mended = blocks(TEXTS[code])
    report = run(mended, tmp_path)
    assert codes(report) <= NOTES - {code}, str(report)
