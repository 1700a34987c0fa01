"""The example, run as a script with fewer steps."""

import re

import pytest
from example_process import example_process


def run(*options: str) -> str:
    done = example_process("ridge_hyperparameters", *options, "--no-progress")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def row(text: str, way: str) -> list[float]:
    return [float(number) for number in re.findall(r"\d+\.\d{8}", re.findall(rf"^ +{way} .*$", text, re.MULTILINE)[1])]


@pytest.mark.slow
def test_implicit_and_unrolled_hypergradients_agree():
    text = run("--steps", "11", "--ways", "implicit", "unrolled")
    implicit, unrolled = row(text, "implicit"), row(text, "unrolled")
    assert implicit[0] == pytest.approx(unrolled[0], abs=1e-6)
    assert implicit[1] == pytest.approx(unrolled[1], abs=5e-4)
    assert implicit[1] < implicit[0] - 0.05


@pytest.mark.slow
def test_loss_after_100_steps_matches_the_paper():
    """The loss after 100 outer steps is the published loss, which the paper's page reports after 990 steps, too."""
    after_100 = row(run("--steps", "101", "--ways", "last"), "last")[2]
    assert after_100 == pytest.approx(0.28535441, abs=2e-6)
