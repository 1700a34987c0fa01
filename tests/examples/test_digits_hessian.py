"""The example, run as a script with smaller settings."""

import re
from pathlib import Path

import pytest
from example_process import example_process

import hodiff


@pytest.mark.slow
def test_script_runs_and_saves_the_figure(tmp_path: Path) -> None:
    figure = tmp_path / "figures" / "spectra.png"
    run = example_process("digits_hessian", "--hidden", "2", "--steps", "20", "--output", figure, "--no-progress")
    assert run.returncode == 0, run.stderr
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert str(figure) in run.stdout
    for route in hodiff.ROUTES:
        before, after = numbers_in_row(run.stdout, route)
        assert max(before, after) < 1e-10
    losses = numbers_in_row(run.stdout, "training loss")
    assert losses[1] < losses[0]


def numbers_in_row(table: str, label: str) -> list[float]:
    row = next(line for line in table.splitlines() if line.startswith(label))
    return [float(number) for number in re.findall(r"\s(-?[\d.]+(?:e[+-]\d+)?)", row)]
