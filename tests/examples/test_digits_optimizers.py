"""Optimizers on digits: the whole example, with fewer steps."""

import math
import re
import runpy
from collections.abc import Callable
from pathlib import Path

import pytest

EXAMPLE = runpy.run_path(str(Path(__file__).resolve().parents[2] / "examples" / "digits_optimizers.py"))


@pytest.mark.slow
def test_every_optimizer_lowers_the_loss(run: Callable[..., str]) -> None:
    text = run(EXAMPLE["main"], "--seconds", "0.4")
    assert "gradcheck passes, gradgradcheck passes" in text
    rows = re.findall(r"^(\w+) +([\d,]+) steps, loss (\S+), ([\d.]+) % of test images$", text, re.MULTILINE)
    assert [name for name, *_ in rows] == list(EXAMPLE["OPTIMIZERS"])
    for _, steps, loss, accuracy in rows:
        assert int(steps.replace(",", "")) >= 3
        assert float(loss) < math.log(10) / 2
        assert float(accuracy) > 75
