"""The documentation lists every Function of the catalogue, and every Function is in the catalogue."""

from pathlib import Path

import pytest
import torch
from functions.catalogue import CASES
from functions.table import REVERSE_ONLY

from hodiff import functions

ROOT = Path(__file__).resolve().parents[2]
# Without derivatives of their own, or with none that a table of derivatives could hold; tested in their family's file.
ELSEWHERE = {"stop_gradient", "clip_gradient", "noise_gradient", "gradient_hook", "nestable_jvp", "straight_through"}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_documentation_lists(case):
    page = (ROOT / "docs" / "guides" / "functions.md").read_text(encoding="utf-8")
    assert f"| `{case.name}` |" in page, "run python tests/functions/table.py"


def test_catalogue_holds_every_public_function():
    public = {name for name in vars(functions) if name.islower() and not name.startswith("_")}
    public = {name for name in public if callable(getattr(functions, name))} - ELSEWHERE
    tested = {case.name.partition("-")[0] for case in CASES}
    assert public <= tested


def test_catalogue_holds_every_public_class():
    classes = {
        name
        for name, value in vars(functions).items()
        if isinstance(value, type) and issubclass(value, torch.autograd.Function)
    }
    held = {case.Function.__name__ for case in CASES if case.Function is not None}
    # The base class of elementwise ones is none itself; these two have no forward mode, which the contract is about.
    assert classes - held == {"ElementwiseFunction", "ClipGradient", "NoiseGradient"}


@pytest.mark.parametrize("name", REVERSE_ONLY)
def test_documentation_lists_what_only_reverse_mode_has(name):
    page = (ROOT / "docs" / "guides" / "functions.md").read_text(encoding="utf-8")
    assert f"| `{name}` (reverse mode only) |" in page, "run python tests/functions/table.py"
