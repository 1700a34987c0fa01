"""Designs with limits: optima from the literature, and multipliers against optimizing again."""

import math
import re
import runpy
from pathlib import Path

import pytest
import torch

import hodiff

EXAMPLE = runpy.run_path(str(Path(__file__).resolve().parents[2] / "examples" / "constrained_design.py"))
TRUSS, BEAM = EXAMPLE["make_problems"]()


@pytest.mark.slow
def test_run_prints_optima_and_multipliers(capsys: pytest.CaptureFixture[str]) -> None:
    EXAMPLE["main"]([])
    text = capsys.readouterr().out
    rows = re.findall(r"^  ([a-z][a-z, ]*(?:bar \d)?) +(-?\d\S+) +(\d\S+) +(-?\d\S+)$", text, re.MULTILINE)
    assert len(rows) == 8
    active = set()
    for name, *numbers in rows:
        value, multiplier, measured = map(float, numbers)
        assert value < 1e-6, name
        assert measured == pytest.approx(multiplier, rel=1e-3, abs=1e-4), name
        if multiplier > 1e-3:
            assert abs(value) < 1e-6, name
            active.add(name.strip())
    assert active == {"stress, bar 1", "shear stress", "bending stress", "buckling", "weld within width"}
    assert text.count("gradcheck passes, gradgradcheck passes") == 2


def test_published_designs_have_the_published_cost() -> None:
    """The published dimensions have six digits, which determine the cost to five."""
    truss = EXAMPLE["design"]((3 + math.sqrt(3)) / 6, 1 / math.sqrt(6))
    assert TRUSS.cost(truss).item() == pytest.approx(263.895843, abs=1e-6)
    assert TRUSS.constraints(truss)["stress, bar 1"].item() == pytest.approx(0, abs=1e-14)
    beam = EXAMPLE["beam"](0.205730, 3.470489, 9.036624, 0.205730)
    assert BEAM.cost(beam).item() == pytest.approx(1.724852, abs=5e-6)
    values = {name: value.item() for name, value in BEAM.constraints(beam).items()}
    deflection = values.pop("deflection")
    assert values == pytest.approx(dict.fromkeys(values, 0.0), abs=1e-5)
    assert deflection < -0.5


def test_missed_optimum_raises(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = EXAMPLE["Problem"](**{**vars(TRUSS), "optimum": 263.9})
    with pytest.raises(hodiff.CheckError, match=r"three-bar truss by trust-constr: 263\.8958\d+, not 263\.9"):
        EXAMPLE["report"](wrong)


def test_design_is_a_dict_of_tensors() -> None:
    found = EXAMPLE["optimize"](TRUSS, "slsqp")
    assert list(found.x) == ["outer", "inner"]
    torch.testing.assert_close(found.x["inner"], torch.tensor(1 / math.sqrt(6), dtype=torch.float64), rtol=1e-4, atol=0)
