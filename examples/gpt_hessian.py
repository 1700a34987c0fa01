"""Largest Hessian eigenvalues of a character GPT with a context of 1,024, before and after training, on a CPU.

    python examples/gpt_hessian.py --quick
    python examples/gpt_hessian.py

The model is plain `torch.nn` with `F.scaled_dot_product_attention`, and reads the manual of Python's `help`. Torch's
fused attention has no second derivative. Its math path has one, but saves the weights of all pairs of characters.
Inside hodiff's operators, the same call saves only queries, keys and values, at every order. The memory of a
Hessian-vector product therefore grows linearly with the context, not with its square. The script prints the three
largest eigenvalues and the smallest. It also compares the cost of products with the math path, each in its own process:
time, and the peak of resident memory that linearization and one product add. A run with the defaults, one core of an
AMD EPYC, in processor seconds:

    context 1,024, 182,144 parameters, float32
                        loss    smallest             the three largest  products  seconds each
    before training    4.838     -41.785    30.180    33.580    34.754        67         0.119
    after training     2.657      -1.972     5.219     5.903     8.539        40         0.114

     context   hodiff, MiB  math path, MiB   hodiff, s  math path, s
         256            11              29       0.015         0.025
         512            19              94       0.028         0.071
        1024            42             437       0.062         0.340
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics

import matplotlib as mpl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from tqdm import trange

import hodiff
from hodiff.checks import along_directions
from hodiff.estimators import eigsh

mpl.use("Agg")
import matplotlib.pyplot as plt

Parameters = dict[str, Tensor]

CHARACTERS = 128  # ASCII
KIBIBYTE = 1024 if sys.platform != "darwin" else 1  # unit of `ru_maxrss`


class Block(nn.Module):
    """Causal attention, then a perceptron, both with residual connections."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_perceptron = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, L, width) to the same shape."""
        q, k, v = self.project(self.before_attention(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.output(attended.transpose(1, 2).flatten(-2))
        return x + self.perceptron(self.before_perceptron(x))


class GPT(nn.Module):
    """Model that computes scores of the next character at every position."""

    def __init__(self, context: int, width: int, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.characters, self.places = nn.Embedding(CHARACTERS, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)), nn.LayerNorm(width))
        self.read = nn.Linear(width, CHARACTERS)
        for each in (self.characters, self.places, self.read):
            nn.init.normal_(each.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        """Map characters (N, L) to scores (N, L, CHARACTERS)."""
        scores: Tensor = self.read(self.blocks(self.characters(text) + self.places.weight[: text.shape[1]]))
        return scores


def load_text() -> Tensor:
    """Return Python's manual of its language, as `help` shows it, by characters."""
    return torch.tensor(list("\n".join(topics.values()).encode("ascii", "replace")))


def draw_text(text: Tensor, count: int, context: int, generator: torch.Generator) -> Tensor:
    """Draw random excerpts (count, context + 1)."""
    starts = torch.randint(len(text) - context, (count, 1), generator=generator)
    return text[starts + torch.arange(context + 1)]


def loss(model: nn.Module, parameters: Parameters, excerpts: Tensor) -> Tensor:
    """Compute the cross-entropy of next characters, in nats."""
    scores = functional_call(model, parameters, (excerpts[:, :-1],))
    return F.cross_entropy(scores.flatten(0, 1), excerpts[:, 1:].flatten())


def point(model: nn.Module) -> Parameters:
    """Return the current parameters."""
    return {name: each.detach().clone() for name, each in model.named_parameters()}


def hessian(model: nn.Module, excerpts: Tensor, way: str = "hodiff") -> hodiff.HessianOperator:
    """Return the Hessian of the loss at the current parameters."""

    def by_math(parameters: Parameters) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return loss(model, parameters, excerpts)

    if way == "hodiff":
        return hodiff.HessianOperator(lambda parameters: loss(model, parameters, excerpts), point(model))
    return hodiff.HessianOperator(by_math, point(model), correct=False)


def train(model: nn.Module, text: Tensor, context: int, steps: int, generator: torch.Generator) -> list[float]:
    """Run Adam on four excerpts per step, and return the losses."""
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=3e-3), []
    for _ in trange(steps, desc="training", leave=False, disable=None):
        optimizer.zero_grad()
        value = loss(model, dict(model.named_parameters()), draw_text(text, 4, context, generator))
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


def peak() -> float:
    """Return the highest resident memory of this process so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIBIBYTE / 2**20


def cost(way: str, context: int, width: int) -> tuple[float, float]:
    """Measure MiB of linearization and a product, after a small warm-up, and the seconds of a later product."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    generator, model = torch.Generator().manual_seed(0), GPT(context, width)
    for length in (16, context):
        before = peak()
        A = hessian(model, draw_text(load_text(), 1, length, generator), way)
        v = torch.ones(A.shape[1])
        A @ v
    raised, begun = peak() - before, time.process_time()
    A @ v
    return raised, time.process_time() - begun


def check() -> str:
    """Run hodiff's check on the loss: all routes, gradgradcheck, SciPy's Hessian."""
    torch.manual_seed(0)
    model = GPT(6, 8, heads=2).double()
    excerpts = draw_text(load_text(), 1, 6, torch.Generator().manual_seed(0))

    def of_weights(parameters: Parameters) -> Tensor:
        return loss(model, parameters, excerpts)

    few = along_directions(of_weights, point(model), size=1e-3)
    return hodiff.assert_differentiable(few, torch.zeros(2, dtype=torch.float64), vmap=False).summary


def draw(losses: Sequence[float], spectra: dict[str, Tensor], costs: dict[str, dict[int, float]], path: Path) -> None:
    """Plot losses by step, eigenvalues before and after training, and memory by context."""
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    left.plot(losses)
    left.set(title="training loss, nats a character", xlabel="step")
    for (moment, values), marker in zip(spectra.items(), "os", strict=True):
        middle.plot(values, marker, label=moment)
    middle.set(title="smallest and largest eigenvalues", xticks=[])
    for way, mebibytes in costs.items():
        right.plot(list(mebibytes), list(mebibytes.values()), "o-", label=way)
    right.set(title="peak memory of a product, MiB", xlabel="context")
    for axes in (middle, right):
        axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=88)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure curvature, train, measure again, and compare costs by context."""
    parser = argparse.ArgumentParser(description="Eigenvalues of a character GPT's Hessian.")
    parser.add_argument("--context", type=int, default=1024, help="length of the context, in characters")
    parser.add_argument("--width", type=int, default=64, help="width of the model, which has four heads")
    parser.add_argument("--steps", type=int, default=200, help="number of steps of Adam")
    parser.add_argument(
        "--quick", action="store_true", help="use context 256, width 16 and ten steps, without the check"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and excerpts")
    parser.add_argument("--output", type=Path, default=Path("figures/gpt_hessian.png"), help="path of the figure")
    options = parser.parse_args(arguments)
    if options.quick:
        options.context, options.width, options.steps = 256, 16, 10
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    generator, text = torch.Generator().manual_seed(options.seed), load_text()
    model = GPT(options.context, options.width)
    held_out = draw_text(text, 2, options.context, generator)
    print(f"context {options.context:,}, {sum(each.numel() for each in model.parameters()):,} parameters, float32")
    print(f"{'':16}{'loss':>8}{'smallest':>12}{'the three largest':>30}{'products':>10}{'seconds each':>14}")
    losses, spectra = [], {}
    for moment, steps in (("before training", 0), ("after training", options.steps)):
        losses += train(model, text, options.context, steps, generator)
        A, begun = hessian(model, held_out), time.process_time()
        found = [eigsh(A, k, which=which, method="lanczos", tol=1e-3) for which, k in (("SA", 1), ("LA", 3))]
        products = sum(each.products for each in found)
        seconds = (time.process_time() - begun) / products
        values = spectra[moment] = torch.cat([each.eigenvalues for each in found])
        value = loss(model, point(model), held_out).item()
        numbers = f"{value:8.3f}{values[0]:12.3f}" + "".join(f"{each:10.3f}" for each in values[1:])
        print(f"{moment:16}{numbers}{products:10}{seconds:14.3f}", flush=True)

    print(f"\n{'context':>8}{'hodiff, MiB':>14}{'math path, MiB':>16}{'hodiff, s':>12}{'math path, s':>14}")
    costs: dict[str, dict[int, float]] = {"hodiff": {}, "math path": {}}
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["hodiff.checks", "matplotlib.pyplot"])  # slow imports
    for part in (4, 1) if options.quick else (4, 2, 1):
        context = options.context // part
        with processes.Pool(1, maxtasksperchild=1) as pool:
            jobs = [(way, context, options.width) for way in costs]
            (ours, our_seconds), (theirs, their_seconds) = pool.starmap(cost, jobs, chunksize=1)
        costs["hodiff"][context], costs["math path"][context] = ours, theirs
        print(f"{context:8}{ours:14.0f}{theirs:16.0f}{our_seconds:12.3f}{their_seconds:14.3f}", flush=True)
    draw(losses, spectra, costs, options.output)
    print(f"Figure: {options.output}")
    if not options.quick:
        print(check())


if __name__ == "__main__":
    main()
