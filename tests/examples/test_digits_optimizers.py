"""Optimizers on digits: the whole example, with fewer steps."""

import math
import re
import runpy
from pathlib import Path

import pytest

EXAMPLE = runpy.run_path(str(Path(__file__).resolve().parents[2] / "examples" / "digits_optimizers.py"))


@pytest.mark.slow
def test_every_optimizer_lowers_the_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figure = tmp_path / "figures" / "optimizers.png"
    EXAMPLE["main"](["--seconds", "0.4", "--output", str(figure)])
    text = capsys.readouterr().out
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert "gradcheck passes, gradgradcheck passes" in text
    rows = re.findall(r"^(\w+) +([\d,]+) steps, loss (\S+), ([\d.]+) % of test images$", text, re.MULTILINE)
    assert [name for name, *_ in rows] == list(EXAMPLE["OPTIMIZERS"])
    for _, steps, loss, accuracy in rows:
        assert int(steps.replace(",", "")) >= 3
        assert float(loss) < math.log(10) / 2
        assert float(accuracy) > 75
