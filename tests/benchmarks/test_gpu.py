"""The benchmarks on a GPU: their sections run on small problems without one, and end within their limits."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import __main__ as gpu


def test_sections_take_at_most_eight_minutes() -> None:
    assert sum(seconds for _, _, seconds in gpu.SECTIONS.values()) <= 480


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would measure for minutes")
def test_full_run_without_a_gpu_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main([]) == 2
    assert "no CUDA device; `small` runs without one" in capsys.readouterr().err


@pytest.mark.slow
def test_small_run_saves_a_page_and_reasons(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["small", "--only", "Laplacian", "operator database", "--save", str(tmp_path)]) == 0
    (saved,) = tmp_path.glob("*.json")
    sections = json.loads(saved.read_text(encoding="utf-8"))["sections"]
    rows = sections["Laplacian"]["rows"]
    assert [row["name"] for row in rows] == ["torch, trace of the Hessian", "hodiff.laplacian"] * 2
    # In float32 and float64, against derivatives by hand in float64.
    assert max(row["error"] for row in rows[:2]) < 1e-4
    assert max(row["error"] for row in rows[2:]) < 1e-12
    assert all(row["milliseconds"] > 0 for row in rows)
    if not torch.cuda.is_available():
        assert "skipped: it compares a GPU with the CPU" in sections["operator database"]["rows"][0]["remark"]
    assert saved.with_suffix(".md").read_text(encoding="utf-8") in capsys.readouterr().out


@pytest.mark.slow
def test_section_beyond_its_limit_is_stopped_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gpu.SECTIONS, "attention", ("attention", "measure", 0.05))
    assert gpu.run("attention", True, []) == "stopped after 0.4 s"
