"""The example, run as a script with smaller settings."""

import re
import subprocess

import pytest
from example_process import example_process


def run(*options: str) -> subprocess.CompletedProcess:
    return example_process("quantized_digits", *options, "--no-progress")


def accuracies(table: str) -> list[float]:
    return [float(number) for number in re.findall(r"^test accuracy.*?([\d.]+) %$", table, re.MULTILINE)]


@pytest.mark.slow
def test_four_bits_are_within_a_point_of_full_precision():
    done = run("--steps", "800")
    assert done.returncode == 0, done.stdout + done.stderr
    full, quantized = accuracies(done.stdout)
    assert full > 95
    assert quantized >= full - 1


@pytest.mark.slow
def test_script_reaches_96_percent():
    done = run()
    assert done.returncode == 0, done.stdout + done.stderr
    full, quantized = accuracies(done.stdout)
    assert min(full, quantized) > 96


@pytest.mark.slow
def test_too_large_accuracy_loss_exits_with_1():
    done = run("--steps", "200", "--bits", "2", "--hidden", "4")
    full, quantized = accuracies(done.stdout)
    assert full - quantized > 1
    assert done.returncode == 1
