"""Committed notebooks: made from their scripts, with outputs that do not depend on the machine.

`make notebooks` runs them.
"""

import runpy
from pathlib import Path

import nbformat
import pytest

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "notebooks"
BUILD = runpy.run_path(str(FOLDER / "build.py"))
SOURCES = BUILD["sources"]([])
each_notebook = pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)


def test_registry_has_eleven_notebooks():
    assert len(SOURCES) == 11
    assert {each.stem for each in FOLDER.glob("*.ipynb")} == {each.stem for each in SOURCES}


@each_notebook
def test_committed_notebook_matches_its_script(source):
    committed = nbformat.read(source.with_suffix(".ipynb"), as_version=4)
    nbformat.validate(committed)
    made = BUILD["unrun"](source)
    assert [(cell.cell_type, cell.source) for cell in committed.cells] == [
        (cell.cell_type, cell.source) for cell in made.cells
    ], "run make notebooks, or build.py --words where only words changed"


@each_notebook
def test_outputs_are_complete_and_clean(source):
    committed = nbformat.read(source.with_suffix(".ipynb"), as_version=4)
    assert not BUILD["complaints"](committed)
    code = [cell for cell in committed.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1)), "run from top to bottom, once"
    kinds = {output.output_type for cell in code for output in cell.outputs}
    assert "error" not in kinds
    assert kinds & {"display_data", "execute_result"}
    assert committed.metadata == BUILD["LANGUAGE"]


def test_complaints_find_machine_dependent_outputs():
    def holding(**output):
        cell = nbformat.v4.new_code_cell("1", outputs=[nbformat.v4.new_output(**output)])
        return BUILD["complaints"](nbformat.v4.new_notebook(cells=[cell]))

    assert not holding(output_type="stream", name="stdout", text="fine")
    assert holding(output_type="stream", name="stderr", text="UserWarning")
    assert holding(output_type="stream", name="stdout", text="in /home/me/hodiff")
    assert holding(output_type="display_data", data={"text/plain": "<f at 0x7f62142c4f90>"})
    assert holding(output_type="display_data", data={"image/png": "A" * 500_000})


def test_tidying_joins_streams_and_shortens_text_beside_html():
    outputs = [nbformat.v4.new_output("stream", name="stdout", text=each) for each in ("a", "b")]
    shown = nbformat.v4.new_output("display_data", data={"text/html": "<b>", "text/plain": "Report(a\nb)"})
    first, second = BUILD["tidied"]([*outputs, shown])
    assert first.text == "ab"
    assert second.data["text/plain"] == "Report(...)"
