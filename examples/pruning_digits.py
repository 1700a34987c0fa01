"""Optimal brain damage: remove weights of a network by the diagonal of the Hessian.

    python examples/pruning_digits.py

At a minimum of the loss, setting one weight w to zero increases the loss by h w^2 / 2, to second order. Here h is the
weight's entry on the diagonal of the Hessian. This increase is its saliency. A large weight may matter little, where
the loss is flat. The script trains a network on digits, and removes more and more of its parameters in the order of

- their saliency, from the exact diagonal, which takes one Hessian-vector product for each parameter;
- their saliency, from a diagonal that is estimated by 100 products;
- their magnitude;
- chance.

It prints test accuracies, once without further training, and once in rounds with some training after each round. While
accuracy is high, saliency keeps more of it than magnitude. After a third of the parameters are removed, the predicted
increase of the loss is several times too small, because training stops before a minimum, and other entries of the
Hessian contribute. With `--weight-decay 0.001 --steps 400`, training ends at a minimum. The predicted increase is then
about right until half of the parameters are removed. Magnitude is then about as good, because weight decay has shrunk
the weights that matter little.

Source: Y. LeCun, J. S. Denker, S. A. Solla, "Optimal brain damage", NIPS 1989, equation 5.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib as mpl
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from tqdm import tqdm

import hodiff
from hodiff.checks import along_directions
from hodiff.estimators import diagonal

mpl.use("Agg")
import matplotlib.pyplot as plt

Parameters = dict[str, Tensor]
Score = Callable[["Trained"], Tensor]

FRACTIONS = (0.1, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9)  # fractions of parameters to remove
PRODUCTS = 100


class Trained:
    """Network and its training set; parameters outside of the mask stay zero.

    Args:
        hidden: Width of the hidden layer.
        images: Training images, (n, 64).
        labels: Training labels, (n,).
        weight_decay: Ridge penalty on all parameters.
        seed: Seed of the initial weights.
    """

    def __init__(self, hidden: int, images: Tensor, labels: Tensor, weight_decay: float, seed: int):
        torch.manual_seed(seed)
        self.network = nn.Sequential(nn.Linear(64, hidden), nn.Tanh(), nn.Linear(hidden, 10))
        self.images = images
        self.labels = labels
        self.weight_decay = weight_decay
        self.seed = seed
        self.mask = torch.ones_like(self.weights)

    @property
    def parameters(self) -> Parameters:
        """All parameters."""
        return {name: parameter.detach() for name, parameter in self.network.named_parameters()}

    @property
    def weights(self) -> Tensor:
        """All parameters in one vector."""
        return parameters_to_vector(self.network.parameters()).detach()

    def loss(self, parameters: Parameters) -> Tensor:
        """Compute the loss, which training minimizes."""
        outputs = functional_call(self.network, parameters, (self.images,))
        size = sum(parameter.square().sum() for parameter in parameters.values())
        return F.cross_entropy(outputs, self.labels) + self.weight_decay / 2 * size

    def train(self, steps: int, rate: float) -> None:
        """Run Adam on all images, with a cosine schedule."""
        optimizer = torch.optim.Adam(self.network.parameters(), lr=rate)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(steps, 1))
        for _ in range(steps):
            optimizer.zero_grad()
            self.loss(dict(self.network.named_parameters())).backward()
            optimizer.step()
            schedule.step()
            self.keep(self.mask)

    def keep(self, mask: Tensor) -> None:
        """Set parameters outside of the mask to zero."""
        self.mask = mask
        vector_to_parameters(self.weights * mask, self.network.parameters())

    def remove(self, fraction: float, scores: Tensor) -> None:
        """Remove the parameters of lowest score, in addition to those removed before, up to this fraction."""
        order = torch.where(self.mask > 0, scores, -torch.inf).argsort()
        self.keep(self.mask.index_fill(0, order[: round(fraction * len(order))], 0))

    def accuracy(self, images: Tensor, labels: Tensor) -> float:
        """Return the accuracy in percent."""
        with torch.no_grad():
            return 100 * (self.network(images).argmax(dim=1) == labels).double().mean().item()


def check(hidden: int, weight_decay: float) -> str:
    """Run hodiff's check on the loss, in float64: all routes, gradgradcheck, SciPy's Hessian."""
    pixels, labels = load_digits(return_X_y=True)
    trained = Trained(hidden, torch.from_numpy(pixels[:200]) / 16, torch.from_numpy(labels[:200]), weight_decay, 0)
    trained.network.double()
    few = along_directions(trained.loss, trained.parameters, size=0.1)
    return hodiff.assert_differentiable(few, torch.zeros(2, dtype=torch.float64), vmap=False).summary


def saliency(trained: Trained) -> Tensor:
    """Compute the saliency of each parameter, by the exact diagonal."""
    curvature = hodiff.hessian_diagonal(trained.loss)(trained.parameters)
    return parameters_to_vector(curvature.values()) * trained.weights.square() / 2


def estimated_saliency(trained: Trained) -> Tensor:
    """Compute the saliency of each parameter, by an estimated diagonal."""
    A = hodiff.HessianOperator(trained.loss, trained.parameters)
    return diagonal(A, products=PRODUCTS).value * trained.weights.square() / 2


def magnitude(trained: Trained) -> Tensor:
    """Return the magnitude of each parameter."""
    return trained.weights.abs()


def chance(trained: Trained) -> Tensor:
    """Return random scores."""
    return torch.rand(len(trained.weights), generator=torch.Generator().manual_seed(trained.seed))


SCORES: dict[str, Score] = {
    "saliency, exact diagonal": saliency,
    f"saliency, {PRODUCTS} products": estimated_saliency,
    "magnitude": magnitude,
    "chance": chance,
}


def run(options: argparse.Namespace, seed: int, progress: bool) -> tuple[dict[str, dict[str, Tensor]], Tensor]:
    """Return accuracies by experiment and score, first with nothing removed, and predicted and actual increases."""
    pixels, labels = load_digits(return_X_y=True)
    split = train_test_split(pixels / 16, labels, train_size=1000, random_state=seed, stratify=labels)
    images, test_images, labels, test_labels = (torch.from_numpy(part) for part in split)
    images, test_images = images.float(), test_images.float()

    def fresh() -> Trained:
        return Trained(options.hidden, images, labels, options.weight_decay, seed)

    whole = fresh()
    whole.train(options.steps, 0.01)
    start, accuracy = whole.weights, whole.accuracy(test_images, test_labels)
    value = whole.loss(whole.parameters).item()
    experiments: dict[str, dict[str, Tensor]] = {"at once": {}, "in rounds": {}}
    rises = []
    with tqdm(total=2 * len(SCORES), desc=f"seed {seed}", leave=False, disable=not progress) as bar:
        for retraining, (experiment, curves) in zip((0, options.retrain), experiments.items(), strict=True):
            for name, score in SCORES.items():
                trained = fresh()
                vector_to_parameters(start, trained.network.parameters())
                scores = score(trained)
                curve = [accuracy]
                for fraction in FRACTIONS:
                    if retraining and fraction != FRACTIONS[0]:
                        scores = score(trained)
                    trained.remove(fraction, scores)
                    if experiment == "at once" and score is saliency:
                        foreseen = (scores * (1 - trained.mask)).sum().item()
                        rises.append([foreseen, trained.loss(trained.parameters).item() - value])
                    trained.train(retraining, 0.003)
                    curve.append(trained.accuracy(test_images, test_labels))
                curves[name] = torch.tensor(curve)
                bar.update()
    return experiments, torch.tensor(rises)


def draw(experiments: dict[str, dict[str, Tensor]], retrain: int, path: Path) -> None:
    """Plot accuracy by the removed fraction, one panel per experiment and one thin line per seed."""
    figure, panels = plt.subplots(1, 2, figsize=(11, 4.5), sharey=True, layout="constrained")
    titles = ("without further training", f"{retrain} steps of training after each removal")
    for axes, title, curves in zip(panels, titles, experiments.values(), strict=True):
        for name, accuracies in curves.items():
            (line,) = axes.plot((0, *FRACTIONS), accuracies.mean(dim=0), marker="o", markersize=3, label=name)
            axes.plot((0, *FRACTIONS), accuracies.T, color=line.get_color(), linewidth=0.5, alpha=0.4)
        axes.set(title=title, xlabel="parameters removed")
        axes.xaxis.set_major_formatter(mpl.ticker.PercentFormatter(1))
        axes.grid(alpha=0.3)
        axes.legend()
    panels[0].set_ylabel("test accuracy, %")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Pruning by the diagonal of the Hessian.")
    parser.add_argument(
        "--quick", action="store_true", help="use one seed, a hidden layer of 16 and 50 steps per round"
    )
    parser.add_argument("--hidden", type=int, default=32, help="width of the hidden layer")
    parser.add_argument("--steps", type=int, default=150, help="number of training steps")
    parser.add_argument(
        "--retrain", type=int, default=100, help="number of training steps after each round of removals"
    )
    parser.add_argument("--weight-decay", type=float, default=0.0, help="ridge penalty")
    parser.add_argument("--seeds", type=int, default=3, help="number of networks and splits to average over")
    parser.add_argument("--output", type=Path, default=Path("figures/pruning_digits.png"), help="path of the figure")
    parser.add_argument("--no-progress", action="store_true", help="hide progress bars")
    options = parser.parse_args(arguments)
    if options.quick:
        options.seeds, options.hidden, options.retrain = 1, 16, 50
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, prune in every order, and print and plot accuracies."""
    options = parse_options(arguments)
    progress = sys.stderr.isatty() and not options.no_progress
    torch.set_num_threads(1)  # the matrices are small: more threads would only wait for each other
    runs = [run(options, seed, progress) for seed in range(options.seeds)]
    experiments = {
        experiment: {name: torch.stack([each[experiment][name] for each, _ in runs]) for name in SCORES}
        for experiment in runs[0][0]
    }
    print(check(options.hidden, options.weight_decay))
    size = 75 * options.hidden + 10
    print(f"network 64-{options.hidden}-10, {size:,} parameters; test accuracy in %, mean of {options.seeds} seeds")
    for experiment, curves in experiments.items():
        title = "at once" if experiment == "at once" else f"in rounds, {options.retrain} steps of training after each"
        print(f"\n{f'removed {title}':50}" + "".join(f"{fraction:>8.0%}" for fraction in (0, *FRACTIONS)))
        for name, accuracies in curves.items():
            print(f"{name:50}" + "".join(f"{accuracy:>8.1f}" for accuracy in accuracies.mean(dim=0).tolist()))
    rises = torch.stack([each for _, each in runs]).mean(dim=0)
    print(f"\n{'rise of the loss, removed at once by saliency':58}" + "".join(f"{each:>8.0%}" for each in FRACTIONS))
    for name, row in zip(("foreseen", "actual"), rises.T.tolist(), strict=True):
        print(f"{name:58}" + "".join(f"{rise:>8.4f}" for rise in row))
    draw(experiments, options.retrain, options.output)
    print(f"\nFigure: {options.output}")


if __name__ == "__main__":
    main()
