"""The memory of the implicit meta-gradient, measured for several numbers of inner steps."""

import re
import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

import hodiff


def rows(text: str, way: str) -> list[list[float]]:
    return [[float(cell) for cell in line.split()] for line in re.findall(rf"^ +{way} +(.*)$", text, re.MULTILINE)]


@pytest.mark.skipif(sys.platform == "win32", reason="needs the resource module")
@pytest.mark.slow
def test_implicit_memory_is_constant_in_the_steps(
    example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figure = tmp_path / "figures" / "memory.png"
    example.main(["--quick", "--no-progress", "--out", str(figure)])
    text = capsys.readouterr().out
    errors, memory = {}, {}
    for way in ("unrolled", "checkpointed", "implicit"):
        errors[way], memory[way], _ = rows(text, way)
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert max(memory["implicit"]) < 3
    assert memory["unrolled"][-1] > 20
    assert memory["unrolled"][-1] > 5 * memory["unrolled"][0]  # for eight times the steps
    assert memory["checkpointed"][-1] < memory["unrolled"][-1] / 3
    assert errors["checkpointed"] == errors["unrolled"]
    for values in errors.values():
        assert all(after < before / 2 for before, after in pairwise(values))
        assert values[-1] < 3e-3
    assert all(a < b for a, b in zip(errors["implicit"], errors["unrolled"], strict=True))


@pytest.mark.slow
def test_meta_gradients_match_finite_differences(example: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(example, "STRENGTH", 2.0)  # 80 steps then reach the limit
    network, tasks = example.make_problem(hidden=3, seed=1)
    found = {way: example.meta_gradient(make(network, 80), tasks).numpy() for way, make in example.WAYS.items()}
    learner = example.unrolled(network, 80)
    start = torch.nn.utils.parameters_to_vector(network.parameters()).detach()
    direction = torch.randn(len(start), dtype=start.dtype, generator=torch.Generator().manual_seed(0))

    def value(t: float) -> float:
        torch.nn.utils.vector_to_parameters(start + t * direction, network.parameters())
        with torch.no_grad():
            return learner(tasks).item()

    slope = (value(1e-4) - value(-1e-4)) / 2e-4
    for gradient in found.values():
        assert gradient @ direction.numpy() == pytest.approx(slope, rel=1e-5)
    np.testing.assert_allclose(found["checkpointed"], found["unrolled"], rtol=1e-10)


def test_disagreement_raises(example: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(example, "LIMIT_STEPS", 20)
    with pytest.raises(hodiff.CheckError, match="after 20 steps unrolled and implicit are"):
        example.find_limit(hidden=4, seed=0)
