"""Find wrong labels in a training set: learn one weight per example by the gradient of the validation loss.

    python examples/data_cleaning_digits.py --quick
    python examples/data_cleaning_digits.py

Half of the labels of 1,000 images of digits are replaced by random wrong ones; 200 more images with right labels are
for validation. A softmax regression is trained on the 1,000 images, each with a weight in (0, 1). The result of
training depends on the weights. The hypergradient, the derivative of the validation loss with respect to the weights,
takes one linear system with the Hessian of the training loss, for any length of training. Gradient descent on the
weights lowers the weights of wrong labels. The script prints how well low weights find wrong labels, and accuracies on
the remaining images. It compares regressions trained on all labels, on the kept labels, and on the right labels. Each
is trained with and without the validation images.

The problem is from L. Franceschi, M. Donini, P. Frasconi, M. Pontil, "Forward and reverse gradient-based hyperparameter
optimization", ICML 2017, section 5.1; the implicit hypergradient with warm starts is from F. Pedregosa, "Hyperparameter
optimization with approximate gradient", ICML 2016, algorithm 1.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib as mpl
import numpy as np
import torch
import torch.nn.functional as F
from scipy.optimize import minimize
from sklearn.datasets import load_digits
from sklearn.metrics import f1_score, precision_score, recall_score
from torch import Tensor
from tqdm import trange

import hodiff
from hodiff.checks import along_directions
from hodiff.meta import hypergradient

mpl.use("Agg")
import matplotlib.pyplot as plt

PENALTY = 1e-3  # on the squared coefficients of the regression
OUTER_RATE = 0.1
DIFFERENCE = 1e-3
DIFFERENCES_AGREE_TO = 1e-5  # relative


@dataclass(frozen=True)
class Examples:
    """Images with a constant pixel, and their labels."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, which: Tensor | slice) -> Examples:
        return Examples(self.images[which], self.labels[which])

    def __add__(self, other: Examples) -> Examples:
        return Examples(torch.cat([self.images, other.images]), torch.cat([self.labels, other.labels]))

    def losses(self, regression: Tensor) -> Tensor:
        """Compute the cross-entropy of each example."""
        return F.cross_entropy(self.images @ regression, self.labels, reduction="none")

    def accuracy(self, regression: Tensor) -> float:
        """Return the percentage of images that are classified right."""
        return 100 * ((self.images @ regression).argmax(dim=1) == self.labels).double().mean().item()


@dataclass(frozen=True)
class Problem:
    """Training set with wrong labels, and a validation set from which weights of the examples are learned."""

    training: Examples
    validation: Examples

    def inner(self, regression: Tensor, scores: Tensor) -> Tensor:
        """Compute the training loss; an example's weight is the sigmoid of its score."""
        return (scores.sigmoid() * self.training.losses(regression)).mean() + PENALTY * regression.square().sum()

    def outer(self, regression: Tensor, scores: Tensor) -> Tensor:
        """Compute the validation loss."""
        del scores
        return self.validation.losses(regression).mean()

    def fit(self, scores: Tensor, start: Tensor | None = None) -> Tensor:
        """Minimize the training loss by SciPy's trust region method with exact Hessian-vector products."""
        start = scores.new_zeros(self.training.images.shape[1], 10) if start is None else start

        def loss(regression: Tensor) -> Tensor:
            return self.inner(regression, scores)

        def shaped(flat: np.ndarray) -> Tensor:
            return torch.from_numpy(flat).view(start.shape)

        done = minimize(
            lambda at: loss(shaped(at)).item(),
            start.flatten().numpy(),
            jac=lambda at: torch.func.grad(loss)(shaped(at)).flatten().numpy(),
            hessp=lambda at, v: hodiff.hvp(loss, shaped(at), shaped(v)).flatten().numpy(),
            method="trust-ncg",
            options={"gtol": 1e-9},
        )
        return shaped(done.x)


@dataclass
class Course:
    """Record of learning the weights.

    Attributes:
        scores: The final scores. Examples with scores above zero, and weights above a half, are kept.
        losses: The validation loss before each outer step.
        f1: F1 score of finding wrong labels by low weights, before each outer step.
        error: The largest estimated error of a hypergradient, relative.
    """

    scores: Tensor
    losses: list[float] = field(default_factory=list)
    f1: list[float] = field(default_factory=list)
    error: float = 0.0


def load(options: argparse.Namespace) -> tuple[Problem, Tensor, Examples]:
    """Return the problem, the mask of wrong labels, and examples for the test."""
    generator = torch.Generator().manual_seed(options.seed)
    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=generator)
    everything = Examples(
        F.pad(torch.from_numpy(pixels) / 16, (0, 1), value=1.0)[order], torch.from_numpy(labels)[order]
    )
    clean, rest = everything[: options.images], everything[options.images :]
    wrong = torch.zeros(len(clean), dtype=torch.bool)
    wrong[torch.randperm(len(clean), generator=generator)[: round(options.wrong * len(clean))]] = True
    shifts = torch.randint(1, 10, wrong.shape, generator=generator) * wrong
    dirty = Examples(clean.images, (clean.labels + shifts) % 10)
    return Problem(dirty, rest[: options.validation]), wrong, rest[options.validation :]


def check_losses(problem: Problem, seed: int) -> list[str]:
    """Run hodiff's check on the training and validation losses: all routes, gradgradcheck, SciPy's Hessian."""
    generator = torch.Generator().manual_seed(seed)
    regression = torch.randn(problem.training.images.shape[1], 10, generator=generator, dtype=torch.float64) / 10
    scores = torch.randn(len(problem.training), generator=generator, dtype=torch.float64)

    def training_loss(both: tuple[Tensor, Tensor]) -> Tensor:
        return problem.inner(*both)

    def validation_loss(both: tuple[Tensor, Tensor]) -> Tensor:
        return problem.outer(*both)

    planes = (along_directions(loss, (regression, scores), size=0.1) for loss in (training_loss, validation_loss))
    zero = torch.zeros(2, dtype=torch.float64)
    return [hodiff.assert_differentiable(few, zero, vmap=False).summary for few in planes]


def check(problem: Problem, seed: int) -> float:
    """Return the relative distance of a slope in a random direction from a central difference over whole trainings."""
    generator = torch.Generator().manual_seed(seed)
    direction = torch.randn(len(problem.training), generator=generator, dtype=torch.float64)

    def value(t: float) -> float:
        return problem.outer(problem.fit(t * direction), direction).item()

    scores = torch.zeros_like(direction)
    result = hypergradient(problem.outer, problem.inner, problem.fit(scores), scores)
    slope = (result.value @ direction).item()
    difference = (value(DIFFERENCE) - value(-DIFFERENCE)) / (2 * DIFFERENCE)
    distance = abs(slope - difference) / abs(difference)
    if not distance <= DIFFERENCES_AGREE_TO:
        raise hodiff.CheckError(f"the hypergradient is {distance:.1e} away from differences: {slope} and {difference}.")
    return distance


def learn(problem: Problem, wrong: Tensor, steps: int, progress: bool) -> Course:
    """Run Adam on the scores; each training starts at the end of the one before."""
    scores = torch.zeros(len(problem.training), dtype=torch.float64)
    optimizer = torch.optim.Adam([scores], lr=OUTER_RATE)
    course = Course(scores)
    regression = None
    bar = trange(steps, desc="outer steps", leave=False, disable=not progress)
    for _ in bar:
        regression = problem.fit(scores, regression)
        result = hypergradient(problem.outer, problem.inner, regression, scores)
        course.losses.append(result.outer)
        course.f1.append(f1_score(wrong, scores <= 0))
        course.error = max(course.error, result.error_estimate / result.value.norm().item())
        scores.grad = result.value
        optimizer.step()
        bar.set_postfix(loss=f"{result.outer:.3f}", f1=f"{course.f1[-1]:.3f}")
    return course


def accuracy_of(examples: Examples, test: Examples) -> float:
    """Return the test accuracy of a regression trained on examples of equal weight."""
    full = torch.full((len(examples),), torch.inf, dtype=torch.float64)
    return test.accuracy(Problem(examples, test).fit(full))


def report(problem: Problem, wrong: Tensor, test: Examples, course: Course) -> None:
    """Print how well wrong labels were found, and test accuracies."""
    dropped = course.scores <= 0
    print(f"hypergradients have an estimated error of at most {course.error:.1e} (relative)")
    print(f"validation loss {course.losses[0]:.3f} -> {course.losses[-1]:.3f} in {len(course.losses)} outer steps\n")
    scores = (precision_score(wrong, dropped), recall_score(wrong, dropped), f1_score(wrong, dropped))
    print("wrong labels found: precision {:.3f}, recall {:.3f}, F1 {:.3f}".format(*scores))
    print(f"(calling all labels wrong has F1 {f1_score(wrong, torch.ones_like(wrong)):.3f})\n")
    print(f"{'test accuracy, trained on':32}{'alone':>8}{'with validation images':>26}")
    for name, kept in (("all labels", wrong | True), ("kept labels", ~dropped), ("right labels", ~wrong)):
        chosen = problem.training[kept]
        alone, together = accuracy_of(chosen, test), accuracy_of(chosen + problem.validation, test)
        print(f"  {f'{name} ({len(chosen):,})':30}{alone:>6.1f} %{together:>24.1f} %")
    name, together = f"none ({len(problem.validation)} for validation)", accuracy_of(problem.validation, test)
    print(f"  {name:38}{together:>24.1f} %")


def draw(course: Course, wrong: Tensor, path: Path) -> None:
    """Plot the course of learning, and the final weights."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    left.plot(course.losses, label="validation loss")
    left.plot(course.f1, label="F1 of finding wrong labels")
    left.set(xlabel="outer step", ylim=(0, None))
    weights = course.scores.sigmoid()
    right.hist([weights[~wrong].numpy(), weights[wrong].numpy()], bins=20, label=["right label", "wrong label"])
    right.set(xlabel="learned weight", ylabel="examples")
    for axes in (left, right):
        axes.legend()
        axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Find wrong labels by hypergradients.")
    parser.add_argument("--quick", action="store_true", help="use 400 images, 100 validation images and 30 outer steps")
    parser.add_argument("--images", type=int, default=1000, help="number of training images")
    parser.add_argument("--validation", type=int, default=200, help="number of validation images, with right labels")
    parser.add_argument("--wrong", type=float, default=0.5, help="fraction of wrong labels")
    parser.add_argument("--steps", type=int, default=200, help="number of outer steps")
    parser.add_argument("--seed", type=int, default=0, help="seed of the split and the wrong labels")
    parser.add_argument(
        "--out", "--output", type=Path, default=Path("figures/data_cleaning_digits.png"), help="path of the figure"
    )
    parser.add_argument("--no-progress", action="store_true", help="hide the progress bar")
    options = parser.parse_args(arguments)
    if options.quick:
        options.images, options.validation, options.steps = 400, 100, 30
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Check, learn, report and draw."""
    options = parse_options(arguments)
    progress = sys.stderr.isatty() and not options.no_progress
    torch.set_num_threads(1)  # the matrices are small: more threads would only wait for each other
    problem, wrong, test = load(options)
    parts = f"{len(problem.training):,} for training, {len(problem.validation)} for validation, {len(test)} for test"
    print(f"images of digits: {parts}; {int(wrong.sum())} wrong labels, softmax regression, float64")
    print(f"the hypergradient is {check(problem, options.seed):.1e} (relative) away from finite differences")
    print(*check_losses(problem, options.seed), sep="\n")
    course = learn(problem, wrong, options.steps, progress)
    report(problem, wrong, test, course)
    draw(course, wrong, options.out)
    print(f"\nFigure: {options.out}")


if __name__ == "__main__":
    try:
        main()
    except hodiff.CheckError as disagreement:
        sys.exit(f"Derivatives disagree: {disagreement}")
