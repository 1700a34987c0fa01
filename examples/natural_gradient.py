"""A natural-gradient step in a few lines, compared with gradient descent on a network that classifies digits.

    python examples/natural_gradient.py

The gradient is the steepest direction in the parameters. The natural gradient F^-1 g is the steepest direction in the
predictions, whose distance the Fisher matrix F measures. The step is `natural_gradient` below: products with F, and one
damped linear system, solved by conjugate gradients.

Both descents use the same batches. Gradient descent uses the best of several learning rates. After the same number of
steps, the loss of the natural gradient is lower by an order of magnitude. Its steps cost much more, because of the
products with F. The table therefore also shows gradient descent after the same time, which reaches a lower loss on such
a small network. With `--natural-rate 1` the natural gradient is even faster, or diverges, depending on the seed.
Source: S. Amari, "Natural gradient works efficiently in learning", Neural Computation 10 (1998), theorem 1; J. Martens,
"New insights and perspectives on the natural gradient method", JMLR 21 (2020), section 6 for the damping.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.func import functional_call, grad
from tqdm import tqdm

import hodiff
from hodiff.checks import along_directions
from hodiff.estimators import solve

Parameters = dict[str, Tensor]
Gradient = Callable[[nn.Module, Parameters, Tensor, Tensor], Parameters]


def loss(network: nn.Module, parameters: Parameters, images: Tensor, labels: Tensor) -> Tensor:
    """Compute the cross-entropy, the negative log-likelihood of the labels."""
    return F.cross_entropy(functional_call(network, parameters, (images,)), labels)


def gradient(network: nn.Module, parameters: Parameters, images: Tensor, labels: Tensor) -> Parameters:
    """Compute the gradient of the loss."""
    slopes: Parameters = grad(lambda parameters: loss(network, parameters, images, labels))(parameters)
    return slopes


def check(hidden: int, images: Tensor, labels: Tensor, seed: int) -> str:
    """Run hodiff's check on the loss, in float64: all routes, gradgradcheck, SciPy's Hessian."""
    torch.manual_seed(seed)
    network = nn.Sequential(nn.Linear(64, hidden), nn.Tanh(), nn.Linear(hidden, 10)).double()
    point = {name: parameter.detach() for name, parameter in network.named_parameters()}

    def cross_entropy(parameters: Parameters) -> Tensor:
        return loss(network, parameters, images.double(), labels)

    few = along_directions(cross_entropy, point, size=0.1)
    return hodiff.assert_differentiable(few, torch.zeros(2, dtype=torch.float64), vmap=False).summary


def natural_gradient(damping: float) -> Gradient:
    """Return a function that computes (F + damping I)^-1 g, to a hundredth of its length."""

    def direction(network: nn.Module, parameters: Parameters, images: Tensor, labels: Tensor) -> Parameters:
        fisher = hodiff.FisherOperator(network, F.cross_entropy, parameters, images, labels)
        slopes = fisher.domain.flatten(gradient(network, parameters, images, labels), "natural_gradient")
        step: Parameters = fisher.domain.unflatten(solve(fisher, slopes, damping=damping, tol=1e-2).value)
        return step

    return direction


@dataclass(frozen=True)
class Digits:
    """Training and test images with pixels from 0 to 1, and their labels."""

    images: Tensor
    test_images: Tensor
    labels: Tensor
    test_labels: Tensor

    @classmethod
    def load(cls, seed: int) -> Digits:
        """Return 1,000 images for training, and the rest for the test."""
        pixels, labels = load_digits(return_X_y=True)
        split = train_test_split(pixels / 16, labels, train_size=1000, random_state=seed, stratify=labels)
        images, test_images, labels, test_labels = (torch.from_numpy(part) for part in split)
        return cls(images.float(), test_images.float(), labels, test_labels)


@dataclass(frozen=True)
class Outcome:
    """Final state of a descent."""

    title: str
    steps: int
    seconds: float
    loss: float
    accuracy: float


def descend(
    title: str,
    direction: Gradient,
    rate: float,
    data: Digits,
    options: argparse.Namespace,
    *,
    seconds: float | None = None,
    progress: bool = False,
) -> Outcome:
    """Take steps against a direction on random batches, as many as the options say or for some seconds."""
    torch.manual_seed(options.seed)
    network = nn.Sequential(nn.Linear(64, options.hidden), nn.Tanh(), nn.Linear(options.hidden, 10))
    parameters = {name: parameter.detach() for name, parameter in network.named_parameters()}
    generator = torch.Generator().manual_seed(options.seed)
    # Warm up: the first call of a torch function in a process takes seconds, which count for neither descent.
    direction(network, parameters, data.images[:1], data.labels[:1])
    start = time.perf_counter()

    def steps() -> Iterator[int]:
        step = 0
        while step < options.steps if seconds is None else time.perf_counter() - start < seconds:
            yield step
            step += 1

    total = options.steps if seconds is None else None
    taken = 0
    for _ in tqdm(steps(), desc=title, total=total, leave=False, disable=not progress):
        batch = torch.randint(len(data.images), (options.batch,), generator=generator)
        move = direction(network, parameters, data.images[batch], data.labels[batch])
        parameters = {name: parameter - rate * move[name] for name, parameter in parameters.items()}
        taken += 1
    elapsed = time.perf_counter() - start

    final = loss(network, parameters, data.images, data.labels).item()
    guesses = functional_call(network, parameters, (data.test_images,)).argmax(dim=1)
    accuracy = (guesses == data.test_labels).double().mean().item()
    return Outcome(title, taken, elapsed, final if math.isfinite(final) else math.inf, 100 * accuracy)


def report(outcome: Outcome) -> None:
    """Print one row of the table."""
    print(
        f"{outcome.title:40}{outcome.steps:>8,}{outcome.seconds:>10.2f}{outcome.loss:>12.5f}{outcome.accuracy:>12.1f}",
        flush=True,
    )


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="The natural gradient against gradient descent.")
    parser.add_argument("--quick", action="store_true", help="take 25 steps")
    parser.add_argument("--steps", type=int, default=100, help="number of steps of each descent")
    parser.add_argument("--batch", type=int, default=256, help="images per step")
    parser.add_argument("--hidden", type=int, default=32, help="width of the hidden layer")
    parser.add_argument("--damping", type=float, default=0.01, help="damping of the natural gradient")
    parser.add_argument("--natural-rate", type=float, default=0.5, help="learning rate of the natural gradient")
    parser.add_argument(
        "--rates",
        type=float,
        nargs="+",
        default=[0.1, 0.3, 0.6, 1.0, 1.5, 2.0],
        help="learning rates of gradient descent",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the split, the initial weights and the batches")
    parser.add_argument("--no-progress", action="store_true", help="hide progress bars")
    options = parser.parse_args(arguments)
    if options.quick:
        options.steps = 25
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Descend in both ways, from the same weights over the same batches."""
    options = parse_options(arguments)
    progress = sys.stderr.isatty() and not options.no_progress
    torch.set_num_threads(1)  # the matrices are small: more threads would only wait for each other
    data = Digits.load(options.seed)
    print(f"{check(options.hidden, data.images, data.labels, options.seed)}\n")
    print(f"{'':40}{'steps':>8}{'seconds':>10}{'loss':>12}{'test, %':>12}")

    outcomes = {}
    for rate in options.rates:
        title = f"gradient descent, rate {rate:g}"
        outcomes[rate] = descend(title, gradient, rate, data, options, progress=progress)
        report(outcomes[rate])
    direction = natural_gradient(options.damping)
    title = f"natural gradient, rate {options.natural_rate:g}"
    natural = descend(title, direction, options.natural_rate, data, options, progress=progress)
    report(natural)

    best = min(outcomes, key=lambda rate: outcomes[rate].loss)
    title = f"gradient descent, rate {best:g}, as long"
    long = descend(title, gradient, best, data, options, seconds=natural.seconds, progress=progress)
    report(long)
    for other, what in ((outcomes[best], "steps"), (long, "time")):
        print(f"loss in the same {what}: natural gradient {natural.loss:.2e}, gradient descent {other.loss:.2e}")


if __name__ == "__main__":
    main()
