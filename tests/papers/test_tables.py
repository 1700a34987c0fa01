"""Tests of the tables in the READMEs against the saved results."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAPERS = ROOT / "papers"
SAVED = sorted(PAPERS.glob("*/results.json"))


def load_tables_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("papers_tables", PAPERS / "tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tables = load_tables_script()


def results(*verdicts: str) -> dict[str, Any]:
    claims = [{"claim": f"c{i}", "published": "p", "measured": "m", "verdict": v} for i, v in enumerate(verdicts)]
    machine = {"cpu": "C", "threads": 1, "cores": 2, "torch": "2"}
    return {"claims": claims, "seconds": 3.0, "machine": machine}


def save(folder: Path, *verdicts: str) -> None:
    folder.mkdir()
    (folder / "results.json").write_text(json.dumps(results(*verdicts)))
    (folder / "README.md").write_text(f"# {folder.name.title()}\nbefore\n{tables.BEGIN}\nold\n{tables.END}\nafter\n")


def test_index_has_a_row_per_claim_ordered_by_year(tmp_path: Path) -> None:
    save(tmp_path / "b-2001", "reproduced", "not", "ours")
    save(tmp_path / "c-1999-x", "partly")
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in tables.index_table(tmp_path).splitlines()[2:]]
    assert rows == [
        ["[C-1999-X](c-1999-x/README.md), 0 of 1", "c0", "p", "m", "partly"],
        ["[B-2001](b-2001/README.md), 1 of 2", "c0", "p", "m", "reproduced"],
        ["", "c1", "p", "m", "not"],
    ]


def test_readme_update_keeps_the_surrounding_text(tmp_path: Path) -> None:
    folder = tmp_path / "a-2000"
    save(folder, "reproduced")
    for _ in range(2):
        tables.update_readme(folder)
    page = (folder / "README.md").read_text()
    assert page.startswith(f"# {folder.name.title()}\nbefore\n{tables.BEGIN}\n| claim |")
    assert page.endswith(f"Measured in 3 s on C, 1 of 2 cores, torch 2.\n{tables.END}\nafter\n")
    assert "old" not in page


@pytest.mark.parametrize("path", SAVED, ids=lambda path: path.parent.name)
def test_saved_pages_show_the_saved_results(path: Path) -> None:
    found = json.loads(path.read_text())
    assert not found["quick"]
    assert tables.claims_table(found) in (path.parent / "README.md").read_text()
    assert tables.index_table(PAPERS) in (PAPERS / "README.md").read_text()
    assert (path.parent / "figure.png").stat().st_size < 100_000


def test_unknown_paper_is_rejected() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "papers", "--only", "nobody-1900"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "nobody-1900" in done.stderr
