"""Gradients through inner gradients of windowed attention against primitives, the task, and a short run."""

import math
import re
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from plain_attention import plain_attention


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_training_step_matches_primitives(example: ModuleType, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference writes out the inner loop, with torch's own gradient of a gradient."""
    torch.manual_seed(0)
    reader = example.Reader(8, window=3, steps=steps).double()
    generator = torch.Generator().manual_seed(0)
    signals = example.draw_signals(3, 20, example.TRAINED, generator)[0].double()
    parameters = dict(reader.named_parameters())
    found = example.loss(reader, parameters, signals)
    slopes = torch.autograd.grad(found, list(parameters.values()), allow_unused=True)
    monkeypatch.setattr(example, "attention", plain_attention)
    losses = []
    for signal in signals[:, None]:
        fast = {"before": reader.before[None], "after": reader.after[None]}
        for _ in range(steps):
            inner = (reader.predict(fast, signal[:, :10]) - signal[:, 4:10]).square().mean()
            by = torch.autograd.grad(inner, list(fast.values()), create_graph=True)
            fast = {
                name: each - reader.rates[name].exp() * slope
                for (name, each), slope in zip(fast.items(), by, strict=True)
            }
        losses.append((reader.predict(fast, signal[:, 6:]) - signal[:, 10:]).square().mean())
    right = torch.stack(losses).mean()
    torch.testing.assert_close(found, right, rtol=1e-10, atol=0)
    expected = torch.autograd.grad(right, list(parameters.values()), allow_unused=True)
    torch.testing.assert_close(slopes, expected, rtol=1e-10, atol=1e-12)
    assert (slopes[list(parameters).index("rates.before")] is None) == (steps == 0)


def test_prediction_depends_on_the_window_only(example: ModuleType) -> None:
    torch.manual_seed(0)
    reader = example.Reader(8, window=3, steps=0)
    signals = torch.randn(1, 40, generator=torch.Generator().manual_seed(0), requires_grad=True)
    reader(signals)[0, 10].backward()
    # The value at 30 is predicted from three windows of four values each: 24 to 29.
    assert signals.grad is not None
    assert signals.grad[0].nonzero().flatten().tolist() == [24, 25, 26, 27, 28, 29]


def test_signals_have_the_stated_variance_and_noise(example: ModuleType) -> None:
    noisy, clean = example.draw_signals(2000, 50, (0.5, 0.5), torch.Generator().manual_seed(0))
    assert clean.var().item() == pytest.approx(1, abs=0.05)
    assert (noisy - clean).std().item() == pytest.approx(example.NOISE, rel=0.02)
    # A sine of one frequency satisfies x[n] = 2 cos(w) x[n-1] - x[n-2].
    torch.testing.assert_close(clean[:, 2:], 2 * math.cos(0.5) * clean[:, 1:-1] - clean[:, :-2], atol=1e-4, rtol=0)


@pytest.mark.slow
def test_quick_run_prints_and_saves_results(example: ModuleType, run: Callable[..., str]) -> None:
    text = run(example.main, "--quick")
    rows = [
        [float(each) for each in row] for row in re.findall(r"^ +(\d) +([\d.]+) +([\d.]+) +[\d.]+$", text, re.MULTILINE)
    ]
    (none, error, above), (two, less, less_above) = rows
    assert (none, two) == (0, 2)
    assert less < 0.9 * error < 0.9  # 1 is the error of predicting zeros
    assert less_above < 0.6 * above
