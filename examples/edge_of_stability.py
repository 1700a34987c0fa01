"""Gradient descent at the edge of stability: the sharpness of a network rises to 2 / rate, and stays there.

    python examples/edge_of_stability.py

The sharpness is the largest eigenvalue of the Hessian of the training loss. On a quadratic function gradient descent
diverges where the sharpness exceeds 2 / rate. During training on digits, the sharpness of a network rises until it
reaches this value. From then on the loss does not fall at every step, but still falls in the long run, and the
sharpness stays just above 2 / rate, for any rate. Source: J. Cohen et al., "Gradient descent on neural networks
typically occurs at the edge of stability", ICLR 2021, figure 1.

The script measures the sharpness during training, starting from the last eigenvector each time. It plots the sharpness,
the loss and the density of all eigenvalues. At the end it compares the last sharpness with finite differences of
gradients, which need no second derivative. If they disagree, it prints an error and ends with exit status 1.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import matplotlib as mpl
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.func import functional_call
from tqdm import trange

import hodiff
from hodiff import plot
from hodiff.checks import along_directions
from hodiff.estimators import Sharpness, SpectralDensity, sharpness, spectral_density

mpl.use("Agg")
import matplotlib.pyplot as plt

Parameters = dict[str, Tensor]

DIFFERENCES_AGREE_TO = 1e-6  # relative; central differences in float64
ROWS = 6  # rows of the table


@dataclass
class Course:
    """Record of one training run.

    Attributes:
        rate: The learning rate.
        losses: The training loss before each step, and at the end.
        sharpness: The largest eigenvalue, by the number of steps taken before.
        densities: The density of all eigenvalues, by the number of steps taken before.
    """

    rate: float
    losses: list[float] = field(default_factory=list)
    sharpness: dict[int, Sharpness] = field(default_factory=dict)
    densities: dict[int, SpectralDensity] = field(default_factory=dict)

    def ratio(self, step: int) -> float:
        """Return the sharpness over 2 / rate."""
        return self.sharpness[step].value * self.rate / 2

    @property
    def edge(self) -> int | None:
        """Step of the first measurement at 2 / rate or above."""
        return next((step for step in self.sharpness if self.ratio(step) >= 1), None)

    def rises(self, start: int, stop: int) -> int:
        """Count the steps after which the loss was higher than before."""
        part = self.losses[start : stop + 1]
        return sum(after > before for before, after in pairwise(part))


def load_images(count: int) -> tuple[Tensor, Tensor]:
    """Return centred images and one-hot labels in float64, as finite differences need its precision."""
    pixels, labels = load_digits(return_X_y=True)
    images = torch.from_numpy(pixels[:count]) / 16
    return images - images.mean(dim=0), F.one_hot(torch.from_numpy(labels[:count])).double()


def make_network(hidden: int) -> nn.Module:
    """Return a network with one hidden layer of tanh."""
    return nn.Sequential(nn.Linear(64, hidden), nn.Tanh(), nn.Linear(hidden, 10)).double()


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Compute half of the squared distance, averaged over images."""
    return (outputs - targets).square().sum(dim=1).mean() / 2


def train(images: Tensor, targets: Tensor, rate: float, options: argparse.Namespace, progress: bool) -> Course:
    """Run gradient descent on all images, and measure the sharpness at intervals."""
    torch.manual_seed(options.seed)
    network = make_network(options.hidden)
    optimizer = torch.optim.SGD(network.parameters(), lr=rate)

    def loss(parameters: Parameters) -> Tensor:
        return squared_error(functional_call(network, parameters, (images,)), targets)

    def here() -> Parameters:
        return {name: parameter.detach().clone() for name, parameter in network.named_parameters()}

    operator = hodiff.HessianOperator(loss, here())
    course = Course(rate)
    moments = (0, options.steps // 4, options.steps)
    eigenvector = None
    for step in trange(options.steps + 1, desc=f"rate {rate:g}", leave=False, disable=not progress):
        if step % options.every == 0 or step == options.steps:
            A = operator.at(here())
            course.sharpness[step] = sharpness(A, start=eigenvector)
            eigenvector = course.sharpness[step].vector
        if step in moments:
            course.densities[step] = spectral_density(operator.at(here()), samples=4, steps=40)
        optimizer.zero_grad()
        value = squared_error(network(images), targets)
        course.losses.append(value.item())
        if step < options.steps:
            value.backward()
            optimizer.step()

    cold = sharpness(A)
    distance = check(loss, here(), A, course.sharpness[options.steps])
    report(course, cold, distance)
    few = along_directions(loss, here(), size=0.1)
    print(f"{hodiff.assert_differentiable(few, torch.zeros(2, dtype=torch.float64), vmap=False).summary}\n")
    return course


def check(
    loss: Callable[[Parameters], Tensor], parameters: Parameters, A: hodiff.LinearOperator, found: Sharpness
) -> float:
    """Relative distance of the sharpness from the slope of the gradient along its eigenvector."""
    direction = A.domain.unflatten(found.vector)

    def slope(t: float) -> Tensor:
        moved = {name: (each + t * direction[name]).requires_grad_() for name, each in parameters.items()}
        gradients = torch.autograd.grad(loss(moved), list(moved.values()))
        return found.vector @ torch.cat([gradient.flatten() for gradient in gradients])

    expected = ((slope(1e-4) - slope(-1e-4)) / 2e-4).item()
    distance = abs(found.value - expected) / abs(expected)
    if not distance <= DIFFERENCES_AGREE_TO:
        raise hodiff.CheckError(f"the sharpness is {found.value}, differences of gradients say {expected}.")
    return distance


def report(course: Course, cold: Sharpness, distance: float) -> None:
    """Print the course of one training."""
    steps = list(course.sharpness)
    last = steps[-1]
    print(f"rate {course.rate:g}: 2 / rate = {2 / course.rate:.3f}")
    print(f"{'step':>8}{'loss':>12}{'sharpness':>12}{'over 2 / rate':>16}{'products':>10}")
    for step in dict.fromkeys([*steps[:: max(1, len(steps) // ROWS)], last]):
        found = course.sharpness[step]
        print(
            f"{step:>8}{course.losses[step]:>12.5f}{found.value:>12.4f}{course.ratio(step):>16.3f}{found.products:>10}"
        )
    late = [course.ratio(step) for step in steps if step >= 3 * last / 4]
    print(f"mean over the last quarter: {sum(late) / len(late):.3f} of 2 / rate")
    if course.edge is None:
        print("the edge was not reached: use more --steps or a larger rate")
    else:
        before, after = course.rises(0, course.edge), course.rises(course.edge, last)
        print(
            f"the loss rose in {before} of {course.edge} steps before the edge, {after} of {last - course.edge} after"
        )
    print(
        f"the last sharpness took {course.sharpness[last].products} products from the last eigenvector, "
        f"{cold.products} from a random start, and is {distance:.1e} (relative) away from differences of gradients"
    )


def draw(courses: Sequence[Course], path: Path) -> None:
    """Plot loss and sharpness by step, and the density of eigenvalues in the first run."""
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(15, 4.5), layout="constrained")
    for course in courses:
        label = f"rate {course.rate:g}"
        (line,) = left.plot(course.losses, linewidth=0.8, label=label)
        values = [found.value for found in course.sharpness.values()]
        middle.plot(list(course.sharpness), values, color=line.get_color(), label=label)
        middle.axhline(2 / course.rate, color=line.get_color(), linestyle="--", linewidth=0.8)
    for step, density in courses[0].densities.items():
        plot.spectral_density(density, right)
        right.lines[-1].set_label(f"step {step}")
    left.set(title="training loss", xlabel="step", yscale="log")
    middle.set(title="sharpness, and 2 / rate dashed", xlabel="step")
    right.set(title=f"density of eigenvalues, rate {courses[0].rate:g}")
    for axes in (left, middle, right):
        axes.legend()
        axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="The sharpness of a network rises to 2 / rate, and stays there.")
    parser.add_argument("--quick", action="store_true", help="take 800 steps with two rates")
    parser.add_argument("--rates", type=float, nargs="+", default=[0.5, 0.7, 1.0], help="learning rates")
    parser.add_argument("--steps", type=int, default=4000, help="number of training steps")
    parser.add_argument("--every", type=int, default=20, help="steps between measurements")
    parser.add_argument("--images", type=int, default=300, help="number of training images")
    parser.add_argument("--hidden", type=int, default=32, help="width of the hidden layer")
    parser.add_argument("--output", type=Path, default=Path("figures/edge_of_stability.png"), help="path of the figure")
    parser.add_argument("--seed", type=int, default=0, help="seed of the initial weights")
    parser.add_argument("--no-progress", action="store_true", help="hide progress bars")
    options = parser.parse_args(arguments)
    if options.quick:
        options.rates, options.steps = [0.8, 1.0], 800
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Train with each rate, and print and plot the results."""
    options = parse_options(arguments)
    progress = sys.stderr.isatty() and not options.no_progress
    torch.set_num_threads(1)  # the matrices are small: more threads would only wait for each other
    images, targets = load_images(options.images)
    size = sum(parameter.numel() for parameter in make_network(options.hidden).parameters())
    print(f"{len(images):,} images of digits, network 64-{options.hidden}-10, {size:,} parameters, float64\n")
    draw([train(images, targets, rate, options, progress) for rate in options.rates], options.output)
    print(f"Figure: {options.output}")


if __name__ == "__main__":
    try:
        main()
    except hodiff.CheckError as disagreement:
        sys.exit(f"Derivatives disagree: {disagreement}")
