"""Fixtures for the tests of reproductions: one quick run of all papers, and the scripts as modules."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """Return the results of a paper's quick run; the first use runs all papers."""
    out = tmp_path_factory.mktemp("papers")
    done = subprocess.run(
        [sys.executable, "-m", "papers", "--quick", "--jobs", "2", "--out", str(out)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )

    def of(paper: str) -> Any:
        # Exceptions in other papers must not fail this one.
        assert (out / paper / "results.json").exists(), done.stderr
        found = json.loads((out / paper / "results.json").read_text())
        found["figure"] = (out / paper / "figure.png").read_bytes()
        found["stdout"] = done.stdout
        return found

    return of


@pytest.fixture(scope="session")
def script() -> Callable[[str], ModuleType]:
    """Load a paper's script as a module."""
    known: dict[str, ModuleType] = {}

    def load(paper: str) -> ModuleType:
        if paper not in known:
            name = paper.replace("-", "_")
            spec = importlib.util.spec_from_file_location(name, ROOT / "papers" / paper / "reproduce.py")
            assert spec is not None
            assert spec.loader is not None
            # Dataclasses look up their module in sys.modules.
            known[paper] = sys.modules[name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(known[paper])
        return known[paper]

    return load
