"""Tasks to train: networks, data and losses, small enough for a hundred training runs on one core."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from benchmarks.training import language
from benchmarks.training.language import LENGTH, Text

LABELLED = 1200  # images for training; the other 597 are for the test


@dataclass(frozen=True)
class Data:
    """Examples for training and for the test, along the first dimension."""

    inputs: Tensor
    targets: Tensor
    test_inputs: Tensor
    test_targets: Tensor


@dataclass(frozen=True)
class Task:
    """A network, its data and its loss.

    Attributes:
        title: Description with sizes.
        make: Function that returns a network with new weights.
        load: Function that returns the data, always the same.
        loss: Loss of outputs and targets.
        judge: Test score of outputs and targets.
        told: Name of the test score.
        batch: Number of examples in a step.
        large: Number of examples in a step of methods that need large batches.
        seconds: Processor seconds of one training run.
        without: Optimizers that cannot train it, and why.
    """

    title: str
    make: Callable[[], nn.Module]
    load: Callable[[], Data]
    loss: Callable[[Tensor, Tensor], Tensor]
    judge: Callable[[Tensor, Tensor], float]
    told: str
    batch: int
    large: int
    seconds: float
    without: dict[str, str] = field(default_factory=dict)


def digits(shape: tuple[int, ...], *, to_themselves: bool = False) -> Callable[[], Data]:
    """Return a loader of images with pixels from 0 to 1, in a random order; targets are labels or the images."""

    def load() -> Data:
        pixels, labels = (torch.from_numpy(part) for part in load_digits(return_X_y=True))
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        images = pixels[order].float() / 16
        targets = images if to_themselves else labels[order]
        inputs = images.view(-1, *shape)
        return Data(inputs[:LABELLED], targets[:LABELLED], inputs[LABELLED:], targets[LABELLED:])

    return load


def text() -> Data:
    """Return stretches of letters as inputs, and the letters that follow as targets."""
    stretches = Text()
    training, test = stretches.training, stretches.validation[:200]
    return Data(training[:, :-1], training[:, 1:], test[:, :-1], test[:, 1:])


def perceptron() -> nn.Module:
    """Return a perceptron with two hidden layers of 64."""
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))


def convolutions() -> nn.Module:
    """Return two 3 x 3 convolutions with pooling, and a linear layer."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


def autoencoder() -> nn.Module:
    """Return an autoencoder with a bottleneck of eight numbers."""
    widths = (64, 64, 32, 8, 32, 64, 64)
    layers: list[nn.Module] = []
    for fan_in, fan_out in itertools.pairwise(widths):
        layers += [nn.Linear(fan_in, fan_out), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def language_model() -> nn.Module:
    """Return a language model of two layers of width 32 over letters."""
    return language.language_model(Text().vocabulary, width=32, layers=2)


def letters_loss(scores: Tensor, letters: Tensor) -> Tensor:
    """Compute the mean cross-entropy of letters (batch, length) by scores (batch * length, vocabulary)."""
    return cross_entropy(scores, letters.flatten())


def percent_right(scores: Tensor, labels: Tensor) -> float:
    """Return the percentage of labels that have the highest score."""
    return 100 * float((scores.argmax(dim=1) == labels).double().mean())


RIGHT = "test, % right"
TASKS = {
    "perceptron": Task(
        "digits, perceptron 64-64-64-10", perceptron, digits((64,)), cross_entropy, percent_right, RIGHT,
        batch=128, large=LABELLED, seconds=2.0,
    ),
    "convolutions": Task(
        "digits, two convolutions", convolutions, digits((1, 8, 8)), cross_entropy, percent_right, RIGHT,
        batch=128, large=LABELLED, seconds=4.0,
    ),
    "autoencoder": Task(
        "digits, autoencoder 64-64-32-8-32-64-64", autoencoder, digits((64,), to_themselves=True),
        binary_cross_entropy_with_logits, lambda *each: float(binary_cross_entropy_with_logits(*each)), "test loss",
        batch=128, large=LABELLED, seconds=4.0, without={"SophiaG": "draws labels, and here are none"},
    ),
    "letters": Task(
        f"letters, transformer of two layers, {LENGTH} letters of context", language_model, text, letters_loss,
        lambda *each: float(letters_loss(*each)), "test loss", batch=32, large=128, seconds=10.0,
        without={"LayerwiseGaussNewton": "takes a third of a minute for a step here"},
    ),
}  # fmt: skip
