"""MAML learns new shapes in a few steps; the tasks query images that were not shown."""

import re
from collections.abc import Callable
from types import ModuleType

import pytest
import torch


@pytest.mark.slow
def test_quick_run_learns_new_shapes_in_three_steps(example: ModuleType, run: Callable[..., str]) -> None:
    text = run(example.main, "--quick", "--no-progress", output="--out")
    assert "12 shapes of the new digits [3, 4, 7]" in text

    def row(name: str) -> list[float]:
        line = next(line for line in text.splitlines() if line.startswith(name))
        return [float(cell) for cell in re.findall(r"([\d.]+) ±", line)]

    untrained, anil, maml = row("untrained"), row("ANIL"), row("MAML")
    for before, *_ in (untrained, anil, maml):
        assert before == pytest.approx(20, abs=5)
    assert maml[2] > 70
    assert maml[2] > untrained[2] + 10
    assert anil[2] > untrained[2] + 5


def test_tasks_split_support_and_query_images(example: ModuleType) -> None:
    shapes = [torch.arange(20.0).view(20, 1, 1, 1) + 100 * shape for shape in range(7)]
    generator = torch.Generator().manual_seed(0)
    orders = set()
    for _ in range(20):
        support_x, support_y, query_x, query_y = example.draw_task(shapes, 2, generator)
        assert (len(support_x), len(query_x)) == (10, 25)
        assert not set(support_x.flatten().tolist()) & set(query_x.flatten().tolist())
        shape_of = dict(zip(support_y.tolist(), (support_x.flatten() // 100).tolist(), strict=True))
        assert len(set(shape_of.values())) == 5
        assert [shape_of[answer] for answer in query_y.tolist()] == (query_x.flatten() // 100).tolist()
        orders.add(tuple(shape_of.values()))
    assert len(orders) > 10


def test_nearest_mean_matches_by_hand(example: ModuleType) -> None:
    shown, shown_y = torch.tensor([0.0, 2.0, 10.0, 12.0]), torch.tensor([0, 0, 1, 1])
    asked, asked_y = torch.tensor([5.0, 7.0, 7.0, 0.0]), torch.tensor([0, 0, 1, 0])
    found = example.nearest_mean((shown.view(1, 4, 1), shown_y[None], asked.view(1, 4, 1), asked_y[None]))
    assert found.tolist() == [75.0]


def test_rejects_too_few_held_out_digits(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        example.main(["--held-out", "1", "2", "2"])
    assert "--held-out: expected 3 to 7 different digits, got [1, 2]" in capsys.readouterr().err
