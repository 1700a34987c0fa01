"""Optimizers on digits: the whole example, run shorter, and the table by hand."""

import math
import re
import runpy
from pathlib import Path

import pytest
import torch

EXAMPLE = runpy.run_path(str(Path(__file__).resolve().parents[2] / "examples" / "digits_optimizers.py"))


@pytest.mark.slow
def test_every_optimizer_learns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figure, saved = tmp_path / "figures" / "optimizers.png", tmp_path / "table.md"
    options = ["--seconds", "0.4", "--rates", "0.01", "1", "--seeds", "1"]
    EXAMPLE["main"]([*options, "--output", str(figure), "--save", str(saved)])
    text = capsys.readouterr().out
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert "gradcheck passes, gradgradcheck passes" in text
    assert saved.read_text(encoding="utf-8").endswith(text.split("\n\n")[1] + "\n")
    rows = re.findall(r"^\| (.+) \| (0.01|1) \| .+ \| (\S+) \| ([\d,]+) \| ([\d.]+) \|$", text, re.MULTILINE)
    assert [name for name, *_ in rows] == list(EXAMPLE["OPTIMIZERS"])
    for _, _, loss, steps, accuracy in rows:
        assert float(loss) < math.log(10)
        assert int(steps.replace(",", "")) >= 3
        assert float(accuracy) > 20


def test_the_rate_with_the_least_loss_is_taken() -> None:
    row = EXAMPLE["Row"](torch.optim.SGD)
    assert EXAMPLE["tune"](row, (1e-6, 0.3, 1e30), 0.05) == 0.3


def test_the_table_has_medians_of_what_was_seen_next() -> None:
    course = EXAMPLE["Course"]
    courses = [
        course([1, 8, 20], [0.1, 0.8, 2.1], [3.0, 2.0, level], accuracy)
        for level, accuracy in ((0.5, 0.9), (1.0, 0.8), (math.inf, 0.1))
    ]
    *_, line = EXAMPLE["table"]({"one": 0.1}, {"one": courses}, 2.0).splitlines()
    assert line == "| one | 0.1 | 1 |  | 2 | 1 | 20 | 80.0 |"
