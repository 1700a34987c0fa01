"""The edge of stability with fewer steps, and its measurements against dense linear algebra."""

import re
import runpy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.func import functional_call

import hodiff

EXAMPLE = runpy.run_path(str(Path(__file__).resolve().parents[2] / "examples" / "edge_of_stability.py"))


def tables(text: str) -> dict[float, list[list[float]]]:
    """Rows for each rate: step, loss, sharpness, sharpness over 2 / rate, and products."""
    parts = re.split(r"^rate ([\d.]+): .*$", text, flags=re.MULTILINE)[1:]
    rows = {
        float(rate): [line.split() for line in part.splitlines() if re.match(r" +\d", line)]
        for rate, part in zip(parts[::2], parts[1::2], strict=True)
    }
    return {rate: [[float(cell) for cell in row] for row in table] for rate, table in rows.items()}


@pytest.mark.slow
def test_sharpness_rises_to_two_over_the_learning_rate(run: Callable[..., str]) -> None:
    text = run(EXAMPLE["main"], "--quick", "--no-progress")
    courses = tables(text)
    assert list(courses) == [0.8, 1.0]
    for rate, rows in courses.items():
        first, last = rows[0], rows[-1]
        assert last[0] == 800
        assert last[1] < 0.1 * first[1]
        assert first[2] < 0.92 * 2 / rate
        assert last[2] == pytest.approx(2 / rate, rel=0.15)
        assert last[3] == pytest.approx(last[2] * rate / 2, abs=1e-3)
    means = re.findall(r"^mean over the last quarter: ([\d.]+) of 2 / rate$", text, re.MULTILINE)
    assert [float(mean) for mean in means] == pytest.approx([1, 1], abs=0.1)
    for rises in re.findall(r"rose in (\d+) of \d+ steps before the edge, in (\d+) of", text):
        before, after = map(int, rises)
        assert before == 0
        assert after > 100


@pytest.mark.slow
def test_small_learning_rate_does_not_reach_the_edge(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--rates", "0.05", "--steps", "10", "--images", "50", "--hidden", "4", "--no-progress"]
    EXAMPLE["main"]([*options, "--output", str(tmp_path / "edge.png")])
    assert "the edge was not reached" in capsys.readouterr().out


def test_wrong_sharpness_raises() -> None:
    torch.manual_seed(0)
    images, targets = EXAMPLE["load_images"](40)
    network = EXAMPLE["make_network"](3)
    parameters = {name: parameter.detach() for name, parameter in network.named_parameters()}

    def loss(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        return EXAMPLE["squared_error"](functional_call(network, parameters, (images,)), targets)

    found = hodiff.estimators.sharpness(hodiff.HessianOperator(loss, parameters), tol=1e-8)
    dense = torch.linalg.eigvalsh(hodiff.hessian_matrix(loss, parameters))
    assert found.value == pytest.approx(dense[-1].item(), rel=1e-8)
    wrong = hodiff.HessianOperator(lambda p: 1.01 * loss(p), parameters)
    assert EXAMPLE["check"](loss, parameters, wrong, found) < 1e-6
    with pytest.raises(hodiff.CheckError, match="differences of gradients"):
        EXAMPLE["check"](loss, parameters, wrong, hodiff.estimators.sharpness(wrong))
