"""The example, run as a script with fewer steps."""

import re
import subprocess
from pathlib import Path

import pytest
from example_process import example_process


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return example_process("maml_sinusoid", *arguments, "--no-progress")


@pytest.mark.slow
def test_script_learns_and_saves_the_figure(tmp_path: Path) -> None:
    figure = tmp_path / "figures" / "curves.png"
    learners = ["maml", "fomaml", "anil", "meta-sgd", "reptile"]
    done = run("--steps", "150", "--learners", ",".join(learners), "--output", str(figure))
    assert done.returncode == 0, done.stderr
    assert figure.read_bytes().startswith(b"\x89PNG")
    distance = re.search(r"is (\S+) \(relative\) away from finite differences", done.stdout)
    assert distance is not None
    assert float(distance[1]) < 1e-6
    for learner in learners:
        row = next(line for line in done.stdout.splitlines() if line.startswith(f"{learner}, K=5, seed 0"))
        none, one, *_ = (float(cell) for cell in re.findall(r"([\d.]+) ± ", row))
        assert one < 4.5, row
        assert one < none or learner == "reptile", row


@pytest.mark.slow
def test_several_seeds_print_a_summary(tmp_path: Path) -> None:
    done = run("--steps", "20", "--seeds", "2", "--output", str(tmp_path / "curves.png"))
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"seed \d +[\d.]+ ± [\d.]+ +([\d.]+) ± ", done.stdout)
    low, high = sorted(map(float, rows))
    assert low < high
    summary = re.search(r"maml, K=5: median of 2 after one step ([\d.]+), from ([\d.]+) to ([\d.]+)", done.stdout)
    assert summary is not None
    assert (float(summary[2]), float(summary[3])) == (low, high)
    assert abs(float(summary[1]) - (low + high) / 2) < 2e-3


@pytest.mark.slow
def test_rejects_unknown_learners() -> None:
    done = run("--learners", "maml,mammal")
    assert done.returncode == 2
    assert "got mammal" in done.stderr
