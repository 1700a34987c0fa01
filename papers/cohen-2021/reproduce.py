"""Gradient descent at the edge of stability: the sharpness rises to 2 over the learning rate and stays there.

python papers/cohen-2021/reproduce.py
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.func import functional_call
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import hodiff
from benchmarks.objectives import digits
from benchmarks.torch_ways import gradient
from hodiff.estimators import sharpness
from papers.common import OURS, Claim, Reproduction, run, span, verdict

Parameters = dict[str, Tensor]


@dataclass(frozen=True)
class SquaredError:
    """Half the squared distance of a network's outputs to one-hot targets, over centred images."""

    network: nn.Module
    images: Tensor
    targets: Tensor

    def __call__(self, parameters: Parameters) -> Tensor:
        """Compute the loss at the given parameters."""
        outputs = functional_call(self.network, parameters, (self.images,))
        return (outputs - self.targets).square().sum(1).mean() / 2


@dataclass
class Run:
    """Training run: the loss at each step, the sharpness at some steps, and the products for the sharpness."""

    rate: float
    losses: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    sharpness: list[float] = field(default_factory=list)
    products: list[int] = field(default_factory=list)

    def scaled(self) -> Tensor:
        """Return the sharpness over 2 / rate: gradient descent on a quadratic is stable up to 1."""
        return torch.tensor(self.sharpness, dtype=torch.float64) * self.rate / 2

    def at_edge(self) -> Tensor:
        """Return the scaled sharpness from the step where it first reached 1, or an empty tensor."""
        scaled = self.scaled()
        reached = (scaled >= 1).nonzero()
        return scaled[int(reached[0]) :] if len(reached) else scaled[:0]

    def increases(self) -> tuple[int, int]:
        """Count the steps on which the loss rose, before the edge and from there on."""
        rises = torch.tensor(self.losses).diff() > 0
        edge = self.steps[len(self.steps) - len(self.at_edge())] if len(self.at_edge()) else len(rises)
        return int(rises[:edge].sum()), int(rises[edge:].sum())

    def falls_at_edge(self) -> float:
        """Return the last loss over the loss at the edge, both averaged over 20 steps, as losses oscillate there."""
        losses = torch.tensor(self.losses)
        edge = self.steps[len(self.steps) - len(self.at_edge())]
        return (losses[-20:].mean() / losses[edge : edge + 20].mean()).item()


def train(width: int, samples: int, rate: float, steps: int, every: int, progress: bool) -> Run:
    """Run gradient descent on all images, from the same start for all rates."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(64, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 10))
    objective = digits(64, 10, samples=samples)
    images, labels = objective.inputs, objective.targets
    loss = SquaredError(network, images - images.mean(0), F.one_hot(labels, 10).float())
    x = {name: parameter.detach() for name, parameter in network.named_parameters()}
    found, vector = Run(rate), None
    for step in tqdm(range(steps + 1), desc=f"rate {rate}", leave=False, disable=not progress):
        found.losses.append(loss(x).item())
        if step % every == 0:
            top = sharpness(hodiff.HessianOperator(loss, x), start=vector, tol=1e-2)
            vector = top.vector
            found.steps.append(step)
            found.sharpness.append(top.value)
            found.products.append(top.products)
        slope = gradient(loss, x)
        x = {name: x[name] - rate * slope[name] for name in x}
    return found


def draw(runs: list[Run]) -> Figure:
    """Plot sharpness and loss against steps times rate."""
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for index, each in enumerate(runs):
        time = [step * each.rate for step in each.steps]
        left.plot(time, each.sharpness, color=f"C{index}", linewidth=1, label=f"rate {each.rate}")
        left.axhline(2 / each.rate, color=f"C{index}", linestyle=":")
        right.semilogy([step * each.rate for step in range(len(each.losses))], each.losses, linewidth=0.7)
    left.set(xlabel="steps times rate", ylabel="sharpness, and 2 / rate dotted")
    right.set(xlabel="steps times rate", ylabel="training loss")
    left.legend(fontsize=7)
    return figure


def reproduce(quick: bool, progress: bool) -> Reproduction:
    """Train at every rate for the same time, steps times rate."""
    width, samples, rates, time, every = (48, 128, [0.6], 500, 20) if quick else (100, 512, [0.3, 0.4, 0.6], 700, 20)
    runs = [train(width, samples, rate, round(time / rate), every, progress) for rate in rates]
    start = [each.scaled()[0].item() for each in runs]
    hover = [each.at_edge().median().item() if len(each.at_edge()) else 0.0 for each in runs]
    reached = [len(each.at_edge()) > 10 for each in runs]
    increases = [each.increases() for each in runs]
    falls = [each.falls_at_edge() for each in runs if len(each.at_edge())]
    first = span([each.products[0] for each in runs], 0)
    later = [count for each in runs for count in each.products[1:]]
    claims = [
        Claim(
            "The sharpness hovers right at, or just above, 2 / rate",
            "right at, or just above",
            f"{span(hover, 2)} times 2 / rate, median from where it is reached (rates {', '.join(map(str, rates))})",
            verdict(all(0.98 <= value < 1.1 for value in hover), all(0.9 < value < 1.3 for value in hover)),
        ),
        Claim(
            "Before, the sharpness rises (progressive sharpening)",
            "qualitative",
            f"from {span(start, 2)} times 2 / rate; {sum(reached)} of {len(runs)} runs reach 1",
            verdict(all(reached) and max(start) < 0.9, any(reached)),
        ),
        Claim(
            "At the edge the loss is not monotone, yet falls over longer times",
            "qualitative",
            f"it rises on {span([after for _, after in increases], 0)} steps at the edge, and on "
            f"{span([before for before, _ in increases], 0)} before; it ends at {span(falls, 2)} times its value there",
            verdict(
                bool(falls) and all(before == 0 and after > 20 for before, after in increases) and max(falls) < 0.8,
                any(after > 20 for _, after in increases),
            ),
        ),
        Claim(
            "Products per sharpness, starting from the last eigenvector",
            "not in the paper",
            f"{sum(later) / len(later):.0f} products a call on average; {first} for the first",
            OURS,
        ),
    ]
    settings = {"network": f"64-{width}-{width}-10, tanh", "samples": samples, "loss": "squared error", "rates": rates}
    data = {
        str(each.rate): {
            "steps": each.steps,
            "sharpness": each.sharpness,
            "loss": [each.losses[step] for step in each.steps],
        }
        for each in runs
    }
    return Reproduction(claims, settings, data, draw(runs))


if __name__ == "__main__":
    run(__file__, __doc__ or "", reproduce)
