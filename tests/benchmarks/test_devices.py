"""The page of choices by device states the constants that the code has."""

import importlib
import re
from pathlib import Path

import torch

PAGE = Path(__file__).parents[2] / "docs" / "benchmarks" / "devices.md"
ROW = re.compile(r"^\| `(hodiff[\w.]+)\.(\w+)` \| `([^`]+)` \|", re.MULTILINE)


def test_page_states_the_constants_of_the_code():
    rows = ROW.findall(PAGE.read_text(encoding="utf-8"))
    assert len(rows) == 11
    for module, name, value in rows:
        if name == "UNITS" and torch.version.hip:
            continue
        assert getattr(importlib.import_module(module), name) == eval(value, {"torch": torch}), name
