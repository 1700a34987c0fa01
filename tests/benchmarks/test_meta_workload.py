"""The benchmark of meta-gradients: its reference, and detection of wrong results."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import meta_memory
from benchmarks.memory import Peak
from benchmarks.registry import WORKLOADS
from benchmarks.workloads import meta
from hodiff.meta import FOMAML


@pytest.fixture(params=["sinusoid", "digits"])
def episode(request: Any) -> meta.Episode:
    if request.param == "sinusoid":
        return meta.sinusoid(tasks=3, shots=4)
    return meta.digits_cnn(tasks=2, images=5, steps=3)


def meta_loss(episode: meta.Episode) -> float:
    """Meta loss by `torch.optim` and modules alone."""
    start = {name: each.detach().clone() for name, each in episode.network.state_dict().items()}
    values = []
    for support_x, support_y, query_x, query_y in zip(*episode.tasks, strict=True):
        episode.network.load_state_dict(start)
        optimizer = torch.optim.SGD(episode.network.parameters(), lr=episode.rate)
        for _ in range(episode.steps):
            optimizer.zero_grad()
            episode.loss(episode.network(support_x), support_y).backward()
            optimizer.step()
        with torch.no_grad():
            values.append(episode.loss(episode.network(query_x), query_y).item())
    episode.network.load_state_dict(start)
    return sum(values) / len(values)


def test_reference_gradient_matches_differences_of_the_adapted_loss(episode: meta.Episode) -> None:
    precise = episode.double()
    gradients = meta.task_by_task(precise)
    generator = torch.Generator().manual_seed(0)
    directions = {name: torch.randn(each.shape, generator=generator).double() for name, each in gradients.items()}
    start = {name: each.detach().clone() for name, each in precise.network.state_dict().items()}
    values = []
    for sign in (1, -1):
        precise.network.load_state_dict({name: start[name] + sign * 1e-7 * directions[name] for name in start})
        values.append(meta_loss(precise))
    expected = sum((gradients[name] * directions[name]).sum().item() for name in gradients)
    assert (values[0] - values[1]) / 2e-7 == pytest.approx(expected, rel=1e-5)


def test_contestants_agree_with_the_reference(episode: meta.Episode) -> None:
    expected = meta.flat(meta.task_by_task(episode.double()))
    for each in meta.contestants(episode, quick=True):
        assert meta._error(expected, each.run()) < 1e-5, each.name


def test_quick_problem_rejects_first_order_gradients() -> None:
    (problem,) = WORKLOADS["meta"].problems(True)
    assert [each.group for each in problem.contestants] == ["torch", "torch", "hodiff"]
    right = problem.contestants[0].run()
    assert problem.error(right) < problem.tolerance
    episode = meta.sinusoid()
    learner = FOMAML(episode.network, episode.loss, episode.rate, episode.steps)
    leaves = dict(learner.named_parameters())
    wrong = torch.autograd.grad(learner(episode.tasks), list(leaves.values()))
    assert problem.error(dict(zip(leaves, wrong, strict=True))) > problem.tolerance


@pytest.mark.skipif(not meta_memory.STATUS.exists(), reason="the system does not tell")
@pytest.mark.slow
def test_memory_grows_with_steps_unless_checkpointed() -> None:
    """Memory grows with the number of steps, unless checkpointing keeps only a few."""
    few, many = (meta_memory.peak_of(f"T={steps}", "hodiff MAML") for steps in (50, 100))
    assert many > 1.6 * few
    assert meta_memory.peak_of("T=100", "hodiff MAML, checkpoint") < many / 2


def test_memory_figure_is_saved(tmp_path: Path) -> None:
    found = [Peak(f"T={steps}", way, float(steps)) for steps in meta_memory.LENGTHS for way in meta_memory.WAYS]
    meta_memory.draw([*found, Peak("sinusoid", "hodiff MAML", 1.0)], tmp_path)
    assert (tmp_path / "meta-memory.png").stat().st_size > 10_000
