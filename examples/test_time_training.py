"""Test-time training: a network that takes gradient steps while it reads a signal.

    python examples/test_time_training.py --quick
    python examples/test_time_training.py

Signals are two sines of unknown frequencies with noise, and the task is to predict the next value from the previous
ones. A layer of attention sees a window of values, too few to determine the frequencies. Two maps of the network, one
before and one after attention, are fast weights. Each signal starts from the same fast weights, and takes gradient
steps on the error of the first part of the signal, through the window's attention,

    W_(i+1) = W_i - rate · d/dW |prediction(W_i) - next value|^2 on the first part,

and then predicts the rest. Training differentiates the error of the rest with respect to all weights and rates, through
the inner gradients. This is a gradient of a gradient of `hodiff.functions.attention(..., window=...)`, whose cost
depends on the window, not on the square of the length. The script prints errors of the rest as fractions of the
signal's variance, also at frequencies above the training range. The networks differ only in the number of inner steps;
0 is the usual network.

Source: Y. Sun et al., "Learning to (learn at test time): RNNs with expressive hidden states", 2024, sections 2.1 and
2.2. A run with the defaults, one core of an AMD EPYC:

    inner steps    error  at higher frequencies   ms per training step
              0   0.1784                 0.5348                    7.7
              1   0.1023                 0.2249                   25.6
              3   0.0897                 0.1304                   62.1
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad
from tqdm import trange

import hodiff
from hodiff.checks import along_directions
from hodiff.functions import attention

mpl.use("Agg")
import matplotlib.pyplot as plt

Weights = dict[str, Tensor]

NOISE, LAGS = 0.3, 4
TRAINED, ABOVE = (0.2, 1.0), (1.0, 1.3)  # frequencies, in radians a place


class Reader(nn.Module):
    """Attention in a window, between two maps that are adapted to each signal."""

    def __init__(self, width: int, window: int, steps: int, heads: int = 2) -> None:
        super().__init__()
        self.window, self.steps, self.heads = window, steps, heads
        self.embed, self.project = nn.Linear(LAGS, width), nn.Linear(width, 3 * width)
        self.output, self.norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.before = nn.Parameter(torch.eye(width) + torch.randn(width, width) / (10 * width))
        self.after = nn.Parameter(torch.randn(width, 1) / width)
        self.rates = nn.ParameterDict({name: torch.tensor(-2.0) for name in ("before", "after")})

    def predict(self, fast: Weights, signals: Tensor) -> Tensor:
        """Map signals (N, L) and their fast weights (N, ...) to predictions of the values from LAGS on."""
        h = torch.tanh(self.embed(signals[:, :-1].unfold(1, LAGS, 1))) @ fast["before"]
        q, k, v = self.project(h).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = attention(q, k, v, is_causal=True, window=(self.window - 1, 0))
        h = h + torch.tanh(self.output(attended.transpose(1, 2).flatten(-2)))
        return (self.norm(h) @ fast["after"]).squeeze(-1)

    def error(self, fast: Weights, signals: Tensor) -> Tensor:
        """Sum the mean squared errors of predictions over signals, so that each signal has its own gradient."""
        return (self.predict(fast, signals) - signals[:, LAGS:]).square().mean(1).sum()

    def forward(self, signals: Tensor) -> Tensor:
        """Predict the second half of signals (N, L) by weights adapted to the first half."""
        half = signals.shape[1] // 2
        fast = {name: getattr(self, name).expand(len(signals), -1, -1) for name in self.rates}
        for _ in range(self.steps):
            slopes = grad(self.error)(fast, signals[:, :half])
            fast = {name: each - self.rates[name].exp() * slopes[name] for name, each in fast.items()}
        return self.predict(fast, signals[:, half - LAGS :])


def draw_signals(
    count: int, length: int, frequencies: tuple[float, float], generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Draw sums of two sines (count, length), with noise and without; their variance is 1."""
    low, high = frequencies
    frequency = low + (high - low) * torch.rand(2, count, 1, generator=generator)
    phase = 2 * math.pi * torch.rand(2, count, 1, generator=generator)
    clean = torch.sin(frequency * torch.arange(length) + phase).sum(0)
    return clean + NOISE * torch.randn(clean.shape, generator=generator), clean


def loss(reader: nn.Module, weights: Weights, signals: Tensor) -> Tensor:
    """Compute the mean squared error of predictions of the second half."""
    with hodiff.corrected():
        return (functional_call(reader, weights, (signals,)) - signals[:, signals.shape[1] // 2 :]).square().mean()


def train(reader: Reader, training_steps: int, length: int, generator: torch.Generator) -> tuple[list[float], float]:
    """Run Adam on new signals in each step; return losses, and processor seconds per step."""
    optimizer, losses, begun = torch.optim.Adam(reader.parameters(), lr=3e-3), [], time.process_time()
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / training_steps)
    for _ in trange(training_steps, desc=f"{reader.steps} inner steps", leave=False, disable=None):
        optimizer.zero_grad()
        value = loss(reader, dict(reader.named_parameters()), draw_signals(32, length, TRAINED, generator)[0])
        value.backward()
        nn.utils.clip_grad_norm_(reader.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(value.item())
    return losses, (time.process_time() - begun) / training_steps


@torch.no_grad()
def error(reader: Reader, length: int, frequencies: tuple[float, float]) -> float:
    """Compute the error on the second halves of new signals, against values without noise."""
    signals, clean = draw_signals(500, length, frequencies, torch.Generator().manual_seed(1))
    return (reader(signals) - clean[:, length // 2 :]).square().mean().item()


def check() -> str:
    """Run hodiff's check on the loss after an inner step: all routes, gradgradcheck, SciPy's Hessian."""
    torch.manual_seed(0)
    reader = Reader(4, window=3, steps=1).double()
    signals = draw_signals(2, 16, TRAINED, torch.Generator().manual_seed(0))[0].double()

    def of_weights(weights: Weights) -> Tensor:
        return loss(reader, weights, signals)

    few = along_directions(of_weights, {name: each.detach() for name, each in reader.named_parameters()})
    return hodiff.assert_differentiable(few, torch.zeros(2, dtype=torch.float64), vmap=False).summary


def draw(losses: dict[str, list[float]], readers: dict[str, Reader], length: int, path: Path) -> None:
    """Plot losses by step, and predictions of one signal."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.6), layout="constrained")
    for name, values in losses.items():
        count = min(20, len(values))
        left.plot(torch.tensor(values).unfold(0, count, 1).mean(1), label=name)
    left.axhline(NOISE**2, color="gray", linestyle=":", label="the noise")
    left.set(title=f"training loss, mean of {count} steps", xlabel="step", yscale="log")
    signals, clean = draw_signals(1, length, TRAINED, torch.Generator().manual_seed(2))
    places = range(length // 2, length)
    right.plot(places, signals[0, length // 2 :], ".", color="gray", label="signal")
    right.plot(places, clean[0, length // 2 :], color="gray", label="without noise")
    for name, reader in readers.items():
        with torch.no_grad():
            right.plot(places, reader(signals)[0], label=name)
    right.set(title="predictions of the next value", xlabel="place")
    for axes in (left, right):
        axes.legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=88)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train with and without inner steps, and compare."""
    parser = argparse.ArgumentParser(description="Gradient steps at test time, through attention in a window.")
    parser.add_argument("--steps", type=int, default=500, help="number of steps of Adam")
    parser.add_argument("--inner", type=int, nargs="+", default=[0, 1, 3], help="numbers of inner steps")
    parser.add_argument("--length", type=int, default=256, help="length of a signal")
    parser.add_argument("--window", type=int, default=8, help="number of positions that attention sees")
    parser.add_argument("--width", type=int, default=24, help="width of the network")
    parser.add_argument(
        "--quick", action="store_true", help="take 100 steps, with 0 and 2 inner steps, without the check"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and signals")
    parser.add_argument(
        "--output", type=Path, default=Path("figures/test_time_training.png"), help="path of the figure"
    )
    options = parser.parse_args(arguments)
    if options.quick:
        options.steps, options.inner, options.length, options.width = 100, [0, 2], 96, 16
    torch.set_num_threads(1)  # the network is small
    losses, readers = {}, {}
    print(f"{'inner steps':>11}{'error':>9}{'at higher frequencies':>23}{'ms per training step':>23}")
    for steps in options.inner:
        torch.manual_seed(options.seed)
        reader, name = Reader(options.width, options.window, steps), f"{steps} inner step" + "s" * (steps != 1)
        generator = torch.Generator().manual_seed(options.seed)
        readers[name], (losses[name], seconds) = reader, train(reader, options.steps, options.length, generator)
        errors = [error(reader, options.length, each) for each in (TRAINED, ABOVE)]
        print(f"{steps:11}{errors[0]:9.4f}{errors[1]:23.4f}{1e3 * seconds:23.1f}", flush=True)
    draw(losses, readers, options.length, options.output)
    print(f"Figure: {options.output}")
    if not options.quick:
        print(check())


if __name__ == "__main__":
    main()
