"""A network for Poisson's equation: the Laplacian against torch.func, and the whole example with fewer steps."""

import re
import runpy
from pathlib import Path

import pytest
import torch
from torch.func import hessian, vmap

EXAMPLE = runpy.run_path(str(Path(__file__).resolve().parents[2] / "examples" / "poisson_network.py"))


def test_forward_laplacian_matches_torch_func() -> None:
    weights, points = EXAMPLE["make_weights"](0, 5), EXAMPLE["grid"](3)
    value, laplacian = EXAMPLE["solution"](weights, points)

    def u(point: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(weights["W0"] @ point + weights["b0"])
        hidden = torch.tanh(weights["W1"] @ hidden + weights["b1"])
        return (point * (1 - point)).prod() * (weights["W2"] @ hidden + weights["b2"])[0]

    torch.testing.assert_close(value, vmap(u)(points))
    torch.testing.assert_close(laplacian, vmap(hessian(u))(points).diagonal(dim1=1, dim2=2).sum(1))
    of_truth = vmap(hessian(lambda point: EXAMPLE["truth"](point[None])[0]))(points).diagonal(dim1=1, dim2=2).sum(1)
    torch.testing.assert_close(of_truth, -5 * torch.pi**2 * EXAMPLE["truth"](points))


def test_table_lists_medians_and_ratio() -> None:
    course = EXAMPLE["Course"]
    courses = {"a": [course([1.0, 2.0], [1, 2], [1e-2, 1e-5])], "b": [course([1.0, 30.0], [1, 5], [1e-1, 5e-4])]}
    *_, ours, theirs = EXAMPLE["table"](courses).splitlines()
    assert ours == "| a | 1.0e-05 | 2 | 2.0 | 2.00 | 2.00 | 2.00 |  |"
    assert theirs == "| b | 5.0e-04 | 5 | 30.0 | 30.00 |  |  |  |"
    assert EXAMPLE["sooner"](*courses.values()) == 15.0


@pytest.mark.slow
def test_quick_run_learns_with_all_optimizers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figure, saved = tmp_path / "figures" / "poisson.png", tmp_path / "table.md"
    EXAMPLE["main"](["--quick", "--output", str(figure), "--save", str(saved)])
    text = capsys.readouterr().out
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert "gradcheck passes, gradgradcheck passes" in text
    rows = re.findall(r"^\| (ssbroyden|ENGD|torch\.optim\.LBFGS) \| (\S+) \| ([\d,]+) \|", text, re.MULTILINE)
    assert [name for name, *_ in rows] == list(EXAMPLE["WAYS"])
    assert all(float(error) < 0.1 for _, error, _ in rows)
    assert "| ssbroyden |" in saved.read_text(encoding="utf-8")
