"""Influence functions: training images that cause a model's mistakes, and images with wrong labels.

    python examples/influence_digits.py

A softmax regression with a ridge penalty is trained to its minimum. How would the loss of a test image change without
one training image? Influence functions answer this without training again. With the Hessian H of the objective,

    loss without image i - loss  ~  gradient(test)^T H^-1 gradient(i) / n,

which takes one linear system for each test image, solved by products with H, and one product with the Jacobian of all
training losses. The script predicts this difference for the test images with the largest losses. It compares the
prediction with retraining without the image, by SciPy's L-BFGS, which needs no second derivative. If the correlation is
below 0.9, it ends with exit status 1.

Then the script gives a tenth of the training images a wrong label, and searches them among the images with the largest
influence on their own loss. The loss alone finds them equally fast, at no cost. `influence_compared.py` compares
several methods for a network, whose training ends before a minimum.

Source: P. W. Koh, P. Liang, "Understanding black-box predictions via influence functions", ICML 2017, equation 2,
figure 2 and section 5.4.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import matplotlib as mpl
import numpy as np
import torch
import torch.nn.functional as F
from scipy.optimize import minimize
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor
from tqdm import tqdm

import hodiff
from hodiff.checks import along_directions
from hodiff.estimators import solve

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

LEAST_CORRELATION = 0.9
SHOWN = 4  # images of each kind in the figure
INSPECTED = (0.05, 0.1, 0.2, 0.3)  # shares of the training set


@dataclass(frozen=True)
class Data:
    """Images (n, 64) with pixels from 0 to 1 and labels (n,)."""

    images: Tensor
    labels: Tensor

    def __getitem__(self, indices: Tensor) -> Data:
        return Data(self.images[indices], self.labels[indices])

    def __len__(self) -> int:
        return len(self.labels)


def load_images(count: int, seed: int) -> tuple[Data, Data]:
    """Return training and test images, in float64, as leaving out one image of hundreds changes little."""
    pixels, labels = load_digits(return_X_y=True)
    split = train_test_split(pixels / 16, labels, train_size=count, random_state=seed, stratify=labels)
    images, test_images, labels, test_labels = (torch.from_numpy(part) for part in split)
    return Data(images, labels), Data(test_images, test_labels)


def logits(w: Tensor, images: Tensor) -> Tensor:
    """Compute the model's logits; the last row of w is the bias."""
    return images @ w[:-1] + w[-1]


def losses(w: Tensor, data: Data) -> Tensor:
    """Compute the cross-entropy of each image."""
    return F.cross_entropy(logits(w, data.images), data.labels, reduction="none")


def objective(w: Tensor, data: Data, weights: Tensor, penalty: float) -> Tensor:
    """Compute the training objective; a weight of 0 leaves an image out."""
    return weights @ losses(w, data) / len(data) + penalty / 2 * w.square().sum()


def fit(data: Data, penalty: float, weights: Tensor | None = None, start: Tensor | None = None) -> Tensor:
    """Return the minimum, by L-BFGS, to a gradient of 1e-9."""
    weights = torch.ones(len(data), dtype=torch.float64) if weights is None else weights
    start = torch.zeros(65, 10, dtype=torch.float64) if start is None else start

    def value_and_gradient(flat: np.ndarray) -> tuple[float, np.ndarray]:
        w = torch.from_numpy(flat).view_as(start).requires_grad_()
        value = objective(w, data, weights, penalty)
        (gradient,) = torch.autograd.grad(value, w)
        return value.item(), gradient.flatten().numpy()

    options = {"gtol": 1e-9, "ftol": 0, "maxiter": 5000, "maxcor": 30}
    found = minimize(value_and_gradient, start.flatten().numpy(), jac=True, method="L-BFGS-B", options=options)
    # Near the minimum, values are equal up to rounding, and the line search may end before the gradient is that small.
    if not np.abs(found.jac).max() <= 1e-7:
        raise hodiff.HodiffError(f"training did not converge: {found.message}")
    return torch.from_numpy(found.x).view_as(start)


def check(w: Tensor, training: Data, penalty: float) -> str:
    """Run hodiff's check on the objective near its minimum: all routes, gradgradcheck, SciPy's Hessian."""
    weights = torch.ones(len(training), dtype=torch.float64)
    few = along_directions(objective, w, training, weights, penalty, size=1.0)
    return hodiff.assert_differentiable(few, torch.zeros(2, dtype=torch.float64), vmap=False).summary


def influences(w: Tensor, training: Data, tests: Data, penalty: float) -> Tensor:
    """Predict the change of each test loss when a training image is left out: (training, tests)."""
    H = hodiff.HessianOperator(objective, w, training, torch.ones(len(training), dtype=torch.float64), penalty)
    J = hodiff.JacobianOperator(losses, w, training)
    gradients = hodiff.JacobianOperator(losses, w, tests).T @ torch.eye(len(tests), dtype=torch.float64)
    solution = solve(H, gradients)
    print(f"{len(tests)} systems of {len(gradients)} equations: {solution.products} products with the Hessian")
    change: Tensor = J @ solution.value / len(training)
    return change


def self_influences(w: Tensor, training: Data, penalty: float) -> Tensor:
    """Predict the change of each training image's loss when this image is left out."""
    n = len(training)
    H = hodiff.HessianOperator(objective, w, training, torch.ones(n, dtype=torch.float64), penalty)
    gradients = hodiff.JacobianOperator(losses, w, training).T @ torch.eye(n, dtype=torch.float64)
    # With so many systems, the whole matrix costs fewer products than conjugate gradients.
    return (gradients * solve(H, gradients, method="dense").value).sum(dim=0) / n


def leave_out(w: Tensor, training: Data, tests: Data, chosen: Tensor, penalty: float, progress: bool) -> Tensor:
    """Train again without each chosen image; return the changes of the test losses: (chosen, tests)."""
    rows = []
    for index in tqdm(chosen.tolist(), desc="training again", leave=False, disable=not progress):
        weights = torch.ones(len(training), dtype=torch.float64)
        weights[index] = 0
        rows.append(losses(fit(training, penalty, weights, w), tests) - losses(w, tests))
    return torch.stack(rows)


def compare(predicted: Tensor, actual: Tensor, title: str) -> None:
    """Print how well influences predict training again."""
    correlation = torch.corrcoef(torch.stack([predicted.flatten(), actual.flatten()]))[0, 1].item()
    slope = ((predicted * actual).sum() / predicted.square().sum()).item()
    print(f"{title}: correlation {correlation:.4f}, actual change {slope:.3f} times the predicted one")
    if not correlation >= LEAST_CORRELATION:
        raise hodiff.CheckError(f"{title}: influences and training again correlate by {correlation:.3f} only.")


def find_mislabelled(training: Data, penalty: float, seed: int) -> dict[str, list[float]]:
    """Return the shares of wrong labels found by the share of inspected images, for three orders of inspection."""
    generator = torch.Generator().manual_seed(seed)
    n = len(training)
    wrong = torch.randperm(n, generator=generator)[: n // 10]
    labels = training.labels.clone()
    labels[wrong] = (labels[wrong] + torch.randint(1, 10, (len(wrong),), generator=generator)) % 10
    training = replace(training, labels=labels)
    w = fit(training, penalty)
    orders = {
        "by influence on their own loss": self_influences(w, training, penalty),
        "by loss": losses(w, training),
        "at random": torch.rand(n, generator=generator),
    }
    is_wrong = torch.zeros(n, dtype=torch.float64).index_fill(0, wrong, 1)
    return {
        name: [is_wrong[score.topk(round(share * n)).indices].sum().item() / len(wrong) for share in INSPECTED]
        for name, score in orders.items()
    }


def show(axes: Axes, image: Tensor, title: str) -> None:
    """Draw one image."""
    axes.imshow(image.view(8, 8).numpy(), cmap="gray_r")
    axes.set_title(title, fontsize=9)
    axes.set_axis_off()


def draw(training: Data, test: Data, predicted: Tensor, chosen: Tensor, actual: Tensor, guess: int, path: Path) -> None:
    """Draw a test image, its most helpful and harmful training images, and predicted against actual changes."""
    figure = plt.figure(figsize=(13, 5), layout="constrained")
    grid = figure.add_gridspec(2, SHOWN + 4)
    order = predicted.argsort(descending=True)
    show(figure.add_subplot(grid[0, 0]), test.images[0], f"a {test.labels[0]},\nread as {guess}")
    for row, indices, kind in ((0, order[:SHOWN], "helps"), (1, order.flip(0)[:SHOWN], "harms")):
        for column, index in enumerate(indices.tolist(), start=1):
            title = f"{kind}: a {training.labels[index]}\n{predicted[index]:+.3f}"
            show(figure.add_subplot(grid[row, column]), training.images[index], title)
    axes = figure.add_subplot(grid[:, SHOWN + 1 :])
    axes.plot(predicted[chosen], actual, ".")
    axes.axline((0, 0), slope=1, color="gray", linewidth=0.8)
    axes.set(xlabel="predicted by influence", ylabel="retrained", title="change of the test image's loss")
    axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Influence of training images on the loss of test images.")
    parser.add_argument("--quick", action="store_true", help="use 300 images, and leave out 10 of each kind")
    parser.add_argument("--images", type=int, default=1000, help="number of training images")
    parser.add_argument("--tests", type=int, default=5, help="number of test images to explain")
    parser.add_argument("--left-out", type=int, default=40, help="number of images of each kind to leave out")
    parser.add_argument("--penalty", type=float, default=0.01, help="ridge penalty")
    parser.add_argument("--output", type=Path, default=Path("figures/influence_digits.png"), help="path of the figure")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the split, the images left out and the wrong labels"
    )
    parser.add_argument("--no-progress", action="store_true", help="hide progress bars")
    options = parser.parse_args(arguments)
    if options.quick:
        options.images, options.left_out = 300, 10
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Explain test images, train again to check the explanations, and find wrong labels."""
    options = parse_options(arguments)
    progress = sys.stderr.isatty() and not options.no_progress
    torch.set_num_threads(1)  # the matrices are small: more threads would only wait for each other
    training, test = load_images(options.images, options.seed)
    w = fit(training, options.penalty)
    guesses = logits(w, test.images).argmax(dim=1)
    accuracy = 100 * (guesses == test.labels).double().mean().item()
    print(f"{len(training):,} images of digits, softmax regression, test accuracy {accuracy:.1f} %")
    print(check(w, training, options.penalty))

    asked = losses(w, test).topk(options.tests).indices
    tests = test[asked]
    predicted = influences(w, training, tests, options.penalty)
    guess = int(guesses[asked[0]])
    order = predicted[:, 0].argsort(descending=True)
    print(f"\na test image of a {tests.labels[0]}, read as {guess}; its loss is {losses(w, tests)[0]:.3f}")
    for title, indices in (
        ("helped most by", order[:SHOWN]),
        ("harmed most by", order.flip(0)[:SHOWN]),
    ):
        found = (f"{training.labels[i]} (image {i}, {predicted[i, 0]:+.4f})" for i in indices.tolist())
        print(f"  {title} " + ", ".join(found))

    print("\nretrained without one image")
    generator = torch.Generator().manual_seed(options.seed)
    strongest = predicted[:, 0].abs().topk(options.left_out).indices
    drawn = torch.randperm(len(training), generator=generator)[: options.left_out]
    actual = {}
    for title, chosen in (("most influential images", strongest), ("images drawn at random", drawn)):
        actual[title] = leave_out(w, training, tests, chosen, options.penalty, progress)
        compare(predicted[chosen], actual[title], f"  {len(chosen)} {title}")

    print("\nwrong labels found (a tenth of the labels are wrong), by the fraction of images inspected")
    print(f"  {'':32}" + "".join(f"{share:>8.0%}" for share in INSPECTED))
    for name, shares in find_mislabelled(training, options.penalty, options.seed).items():
        print(f"  {name:32}" + "".join(f"{share:>8.0%}" for share in shares))

    both = torch.cat([strongest, drawn])
    draw(training, tests, predicted[:, 0], both, torch.cat([*actual.values()])[:, 0], guess, options.output)
    print(f"\nFigure: {options.output}")


if __name__ == "__main__":
    try:
        main()
    except hodiff.CheckError as disagreement:
        sys.exit(f"Influences are wrong: {disagreement}")
