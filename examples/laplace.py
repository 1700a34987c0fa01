"""Calibrated uncertainty of a network: a Laplace approximation on digits, by K-FAC.

    python examples/laplace.py

A small network is trained on digits from 0 to 7, a tenth of which have random labels, until it memorizes them. It is
then overconfident. Laplace's approximation treats the weights of its last layer as normally distributed around their
trained values, with the precision

    N F + p I,

where F is the Fisher matrix of an image, approximated by `hodiff.KFACOperator`, and p the precision of the prior. The
logits are linear in these weights, so they are normal as well, with the covariance J (N F + p I)^-1 J'. The mean
softmax is approximately a softmax of the logits, each divided by the root of 1 + pi/8 times its variance.

The prior precision p can be chosen by the evidence, the likelihood of the data with the weights integrated out:

    log evidence = log likelihood + 1/2 (n log p - p |w|^2 - log det(N F + p I)).

It can also be chosen by the likelihood of validation images. The results differ: the evidence assumes a network that
was trained with this prior. With the evidence's p, predictions have a higher likelihood than those of the network, but
are underconfident. The table has accuracy, log likelihood, expected calibration error, and the entropy of predictions,
also on the digits 8 and 9, which were never shown. The calibration error is the mean distance of confidence from
accuracy, over ten bins.

A run with the defaults:

                             test, %  likelihood  calibration  entropy  never shown
    one network                 78.9      -1.538       0.1520    0.171        0.497
    p by evidence, 0.18         79.0      -0.949       0.2297    1.383        1.718
    p by validation, 0.56       78.9      -0.847       0.0897    0.930        1.414

Source: D. MacKay, "The evidence framework applied to classification networks", Neural Computation 4 (1992), for the
evidence and the mean of softmaxes; H. Ritter, A. Botev & D. Barber, "A scalable Laplace approximation for neural
networks", ICLR 2018; E. Daxberger et al., "Laplace redux", NeurIPS 2021, for last layers; C. Guo, G. Pleiss, Y. Sun &
K. Weinberger, "On calibration of modern neural networks", ICML 2017, equation 3.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.func import functional_call

import hodiff
from hodiff.checks import along_directions

mpl.use("Agg")
import matplotlib.pyplot as plt

Parameters = dict[str, Tensor]

SHOWN = 8  # classes in the training data
BINS = 10
WRONG = 0.1  # share of random labels


@dataclass(frozen=True)
class Data:
    """Images with pixels from 0 to 1, and their labels."""

    images: Tensor
    labels: Tensor


def load_images(count: int, seed: int) -> tuple[Data, Data, Data, Tensor]:
    """Return images for training, as many for validation, the rest for the test, and images of unseen classes."""
    generator = torch.Generator().manual_seed(seed)
    pixels, labels = (torch.from_numpy(part) for part in load_digits(return_X_y=True))
    order = torch.randperm(len(labels), generator=generator)
    shown = order[labels[order] < SHOWN]
    wrong = torch.rand(labels.shape, generator=generator) < WRONG
    noisy = torch.where(wrong, torch.randint(SHOWN, labels.shape, generator=generator), labels)
    training, validation, test = (
        Data(pixels[part] / 16, noisy[part]) for part in (shown[:count], shown[count : 2 * count], shown[2 * count :])
    )
    return training, validation, test, pixels[labels >= SHOWN] / 16


def train(network: nn.Module, data: Data, precision: float) -> None:
    """Set the network to the most probable weights under a prior of this precision, by L-BFGS."""
    start = {name: parameter.detach() for name, parameter in network.named_parameters()}

    def objective(parameters: Parameters) -> Tensor:
        misfit = F.cross_entropy(functional_call(network, parameters, (data.images,)), data.labels, reduction="sum")
        return misfit + precision / 2 * squared_norm(parameters)

    found = hodiff.optimize.minimize(objective, start, method="l-bfgs-b", options={"maxiter": 300})
    network.load_state_dict(found.x)


def squared_norm(parameters: Parameters) -> Tensor:
    """Return the squared norm of all weights."""
    return torch.stack([each.square().sum() for each in parameters.values()]).sum()


def log_evidence(fisher: hodiff.KFACOperator, log_likelihood: float, count: int, precision: float) -> float:
    """Compute the log evidence of `count` images with this prior precision; `fisher` is the mean over them."""
    n = fisher.shape[0]
    logdet = n * math.log(count) + fisher.logdet(damping=precision / count).value
    return log_likelihood + (n * math.log(precision) - precision * float(squared_norm(fisher.x)) - logdet) / 2


class Laplace:
    """Predictions for some images with the last layer's weights integrated out."""

    def __init__(self, network: nn.Module, fisher: hodiff.KFACOperator, count: int, images: Tensor):
        self.fisher, self.count = fisher, count
        J = hodiff.jacobian(lambda x: functional_call(network, x, (images,)))(fisher.x)
        self.logits = network(images).detach()
        self.columns = torch.cat([each.flatten(2) for each in J.values()], dim=2).flatten(0, 1).T.detach()

    def __call__(self, precision: float) -> Tensor:
        """Return probabilities (images, classes) under a prior of this precision."""
        inverse = self.fisher.inverse(damping=precision / self.count)  # The inverse of F + p/N I is N times too large.
        variances = (self.columns * (inverse @ self.columns)).sum(dim=0).view_as(self.logits) / self.count
        return (self.logits / (1 + math.pi / 8 * variances).sqrt()).softmax(dim=1)


def calibration(probabilities: Tensor, labels: Tensor) -> tuple[float, Tensor, Tensor]:
    """Return the expected calibration error, and mean confidence and accuracy of every bin that is not empty."""
    confidence, guesses = probabilities.max(dim=1)
    right = (guesses == labels).double()
    bins = (confidence * BINS).long().clamp(max=BINS - 1)
    sizes, confidences, rights = (
        torch.zeros(BINS, dtype=torch.float64).index_add(0, bins, each)
        for each in (torch.ones_like(right), confidence, right)
    )
    filled = sizes > 0
    error = (confidences - rights).abs().sum() / len(labels)
    return error.item(), (confidences / sizes)[filled], (rights / sizes)[filled]


def log_likelihood_of(probabilities: Tensor, labels: Tensor) -> float:
    """Return the mean log likelihood over images."""
    return -F.nll_loss(probabilities.log(), labels).item()


def entropy(probabilities: Tensor) -> float:
    """Return the mean entropy over images, in nats."""
    return torch.special.entr(probabilities).sum(dim=1).mean().item()


def check(network: nn.Module, data: Data) -> str:
    """Run hodiff's check on the loss: all routes, gradgradcheck, SciPy's Hessian."""

    def loss(x: Parameters) -> Tensor:
        return F.cross_entropy(functional_call(network, x, (data.images,)), data.labels)

    few = along_directions(loss, {name: each.detach() for name, each in network.named_parameters()})
    return hodiff.assert_differentiable(few, torch.zeros(2, dtype=torch.float64), vmap=False).summary


def draw(chosen: dict[str, dict[float, float]], curves: dict[str, tuple[float, Tensor, Tensor]], path: Path) -> None:
    """Plot the two criteria for the precision, and reliability diagrams."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for (name, values), axes, color in zip(chosen.items(), (left, left.twinx()), ("C1", "C2"), strict=True):
        axes.plot(list(values), list(values.values()), ".-", color=color)
        axes.set_ylabel(name, color=color)
    left.set(title="two opinions on the prior", xlabel="precision", xscale="log")
    right.axline((0, 0), slope=1, color="gray", linewidth=0.8)
    for name, (error, confidences, rights) in curves.items():
        right.plot(confidences, rights, ".-", label=f"{name}: {error:.3f}")
    right.set(title="reliability, and calibration errors", xlabel="confidence", ylabel="share of right answers")
    right.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=88)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, choose the precision in both ways, and compare predictions."""
    parser = argparse.ArgumentParser(description="A Laplace approximation by K-FAC: evidence and calibration.")
    parser.add_argument("--images", type=int, default=300, help="number of training images, and of validation images")
    parser.add_argument("--hidden", type=int, default=32, help="width of the hidden layer")
    parser.add_argument("--precision", type=float, default=0.01, help="precision of the prior in training")
    parser.add_argument("--output", type=Path, default=Path("figures/laplace.png"), help="path of the figure")
    parser.add_argument("--seed", type=int, default=0, help="seed of the split, the labels and the initial weights")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # the matrices are small: more threads would only wait for each other
    torch.manual_seed(options.seed)
    training, validation, test, unseen = load_images(options.images, options.seed)
    network = nn.Sequential(nn.Linear(64, options.hidden), nn.Tanh(), nn.Linear(options.hidden, SHOWN)).double()
    train(network, training, options.precision)
    print(f"{check(network, training)}\n")

    last = {name: parameter.detach() for name, parameter in network.named_parameters() if name.startswith("2.")}
    fisher = hodiff.KFACOperator(network, F.cross_entropy, last, training.images, training.labels)
    validating, testing, never = (
        Laplace(network, fisher, options.images, each) for each in (validation.images, test.images, unseen)
    )
    likelihood = -F.cross_entropy(network(training.images), training.labels, reduction="sum").item()
    grid = torch.logspace(-2, 1, 13, dtype=torch.float64).tolist()
    chosen = {
        "log evidence": {p: log_evidence(fisher, likelihood, options.images, p) for p in grid},
        "log likelihood": {p: log_likelihood_of(validating(p), validation.labels) for p in grid},
    }
    print(f"{'prior precision':>16}{'log evidence':>15}{'validation':>13}")
    for p in grid[::2]:
        print(f"{p:>16.3g}{chosen['log evidence'][p]:>15.1f}{chosen['log likelihood'][p]:>13.3f}")
    ways = {"one network": (testing.logits.softmax(dim=1), never.logits.softmax(dim=1))}
    for name, title in (("log evidence", "p by evidence"), ("log likelihood", "p by validation")):
        best = max(grid, key=chosen[name].__getitem__)
        ways[f"{title}, {best:.2g}"] = testing(best), never(best)

    print(f"\n{'':24}{'test, %':>8}{'likelihood':>12}{'calibration':>13}{'entropy':>9}{'never shown':>13}")
    curves = {}
    for name, (shown, others) in ways.items():
        curves[name] = calibration(shown, test.labels)
        right = 100 * (shown.argmax(dim=1) == test.labels).double().mean().item()
        print(
            f"{name:24}{right:>8.1f}{log_likelihood_of(shown, test.labels):>12.3f}{curves[name][0]:>13.4f}"
            f"{entropy(shown):>9.3f}{entropy(others):>13.3f}"
        )
    draw(chosen, curves, options.output)
    print(f"\nFigure: {options.output}")


if __name__ == "__main__":
    main()
