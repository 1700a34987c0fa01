"""The documentation lists every Function of the catalogue, and the catalogue has every Function."""

from pathlib import Path

import pytest
import torch
from functions.catalogue import CASES
from functions.table import REVERSE_ONLY

from hodiff import functions

ROOT = Path(__file__).resolve().parents[2]
# These have no derivatives, or none that fit a table of derivatives; their own test files test them.
ELSEWHERE = {"stop_gradient", "clip_gradient", "noise_gradient", "gradient_hook", "nestable_jvp", "straight_through"}
# Noise is a constant, and the cases of gumbel_softmax call perturbed_softmax with their own noise.
ELSEWHERE |= {"sample_gumbel", "perturbed_softmax"}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_documentation_lists_every_function(case):
    page = (ROOT / "docs" / "guides" / "functions.md").read_text(encoding="utf-8")
    assert f"| `{case.name}` |" in page, "run python tests/functions/table.py"


def test_catalogue_has_every_public_function():
    public = {name for name in vars(functions) if name.islower() and not name.startswith("_")}
    public = {name for name in public if callable(getattr(functions, name))} - ELSEWHERE
    tested = {case.name.partition("-")[0] for case in CASES}
    assert public <= tested


def test_catalogue_has_every_public_class():
    classes = {
        name
        for name, value in vars(functions).items()
        if isinstance(value, type) and issubclass(value, torch.autograd.Function)
    }
    held = {case.Function.__name__ for case in CASES if case.Function is not None}
    # ElementwiseFunction is a base class. The other two have no forward mode, which the contract tests.
    assert classes - held == {"ElementwiseFunction", "ClipGradient", "NoiseGradient"}


@pytest.mark.parametrize("name", REVERSE_ONLY)
def test_documentation_lists_reverse_only_functions(name):
    page = (ROOT / "docs" / "guides" / "functions.md").read_text(encoding="utf-8")
    assert f"| `{name}` (reverse mode only) |" in page, "run python tests/functions/table.py"
