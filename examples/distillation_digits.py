"""Dataset distillation: ten images, one per class, that train a network better than ten real images.

    python examples/distillation_digits.py --quick
    python examples/distillation_digits.py

A network with random weights takes ten steps of gradient descent on ten images. Which images give the best classifier
of digits? The loss on 1,000 real images is differentiated through the ten steps, with respect to the pixels of the ten
images and the learning rate. Every outer step uses new random weights. The script prints the accuracy on the 797 other
images of networks trained on the distilled images, from unused weights. For comparison, it trains with the same number
of steps on ten random real images, one per class, and on the ten mean images. Their learning rate is the best of a grid
on the 1,000 images. The script draws the learned images, and checks the derivatives of the loss.

Source: T. Wang, J.-Y. Zhu, A. Torralba, A. A. Efros, "Dataset distillation", 2018, algorithm 1.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.func import functional_call, vmap
from tqdm import trange

import hodiff
from hodiff.checks import along_directions
from hodiff.meta import SGD, adapt

mpl.use("Agg")
import matplotlib.pyplot as plt

Batch = tuple[Tensor, Tensor]
# Parameters of many networks; the first dimension counts networks.
Parameters = dict[str, Tensor]

CLASSES = torch.arange(10)
RATES = [0.01 * 2**k for k in range(8)]
NETWORK = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to("meta")  # only its shapes are used


def draw_networks(count: int, generator: torch.Generator) -> Parameters:
    """Draw fresh weights, normal with variance 2 / inputs (He), and biases of zero."""
    return {
        name: torch.randn(count, *each.shape, generator=generator) * (2 / each.shape[1]) ** 0.5
        if each.dim() == 2
        else torch.zeros(count, *each.shape)
        for name, each in NETWORK.named_parameters()
    }


def outputs(networks: Parameters, images: Tensor) -> Tensor:
    """Compute the logits of every network on the same images: (networks, images, 10)."""
    return vmap(lambda network: functional_call(NETWORK, network, (images,)))(networks)


def losses(networks: Parameters, batch: Batch) -> Tensor:
    """Compute the cross-entropy of every network."""
    images, labels = batch
    return vmap(F.cross_entropy, in_dims=(0, None))(outputs(networks, images), labels)


def trained(networks: Parameters, batch: Batch, rate: float | Tensor, steps: int) -> Parameters:
    """Train the networks on one batch for some steps; differentiable in its images and the rate."""
    # The networks are independent, so the gradient of the sum contains the gradient of each network.
    result: Parameters = adapt(lambda p, batch: losses(p, batch).sum(), networks, batch, SGD(rate), steps)
    return result


def check(training: Batch, seed: int) -> str:
    """Run hodiff's check on the loss after two steps, in the images and the rate, in float64."""
    generator = torch.Generator().manual_seed(seed)
    networks = {name: each.double() for name, each in draw_networks(1, generator).items()}
    real = training[0][:100].double(), training[1][:100]

    def distillation_loss(learned: tuple[Tensor, Tensor]) -> Tensor:
        images, log_rate = learned
        return losses(trained(networks, (images, CLASSES), log_rate.exp(), 2), real).mean()

    learned = torch.rand(10, 64, generator=generator).double(), torch.tensor(0.1).double().log()
    few = along_directions(distillation_loss, learned, count=1, size=1e-3)
    return hodiff.assert_differentiable(few, torch.zeros(1, dtype=torch.float64), vmap=False).summary


def accuracies(networks: Parameters, batch: Batch) -> Tensor:
    """Return the percentage of images that each network classifies right."""
    images, labels = batch
    with torch.no_grad():
        return 100 * (outputs(networks, images).argmax(dim=2) == labels).float().mean(dim=1)


def load() -> tuple[Batch, Batch]:
    """Return 1,000 images for training and 797 for the test."""
    pixels, labels = load_digits(return_X_y=True)
    images, targets = torch.from_numpy(pixels).float() / 16, torch.from_numpy(labels)
    order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(0))
    return (images[order[:1000]], targets[order[:1000]]), (images[order[1000:]], targets[order[1000:]])


def one_of_each(batch: Batch, generator: torch.Generator) -> Tensor:
    """Return ten real images, one per class, drawn at random."""
    images, labels = batch
    order = torch.randperm(len(labels), generator=generator)
    return torch.stack([images[next(i for i in order.tolist() if labels[i] == digit)] for digit in range(10)])


def means(batch: Batch) -> Tensor:
    """Return the mean image of each class."""
    images, labels = batch
    return torch.stack([images[labels == digit].mean(dim=0) for digit in range(10)])


def distil(training: Batch, options: argparse.Namespace, progress: bool) -> tuple[Tensor, float]:
    """Learn ten images and a learning rate, starting from random noise."""
    generator = torch.Generator().manual_seed(options.seed)
    images = torch.rand(10, 64, generator=generator).requires_grad_()
    log_rate = torch.tensor(0.7).log().requires_grad_()
    # If the rate grows too fast, the ten steps become unstable before the images adapt.
    optimizer = torch.optim.Adam(
        [{"params": [images]}, {"params": [log_rate], "lr": options.rate / 10}], lr=options.rate
    )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
    bar = trange(options.steps, desc="outer steps", leave=False, disable=not progress)
    for step in bar:
        optimizer.zero_grad()
        networks = draw_networks(options.networks, generator)
        loss = losses(trained(networks, (images, CLASSES), log_rate.exp(), options.inner_steps), training).mean()
        loss.backward()
        nn.utils.clip_grad_norm_([images, log_rate], 1.0)
        optimizer.step()
        scheduler.step()
        if step % 20 == 0:
            bar.set_postfix(loss=f"{loss.item():.3f}", rate=f"{log_rate.exp().item():.3f}")
    return images.detach(), log_rate.exp().item()


def best_rate(sets: Sequence[Batch], training: Batch, steps: int, generator: torch.Generator) -> float:
    """Return the learning rate of the grid with which these sets train best, judged on the training images."""
    networks = draw_networks(max(1, 20 // len(sets)), generator)

    def score(rate: float) -> float:
        return torch.cat([accuracies(trained(networks, batch, rate, steps), training) for batch in sets]).mean().item()

    with torch.no_grad():
        return max(RATES, key=score)


def evaluate(sets: Sequence[Batch], rate: float, steps: int, test: Batch, count: int) -> Tensor:
    """Return test accuracies of new networks, `count` per set: (sets * count,)."""
    generator = torch.Generator().manual_seed(10_000)
    with torch.no_grad():
        return torch.cat([accuracies(trained(draw_networks(count, generator), s, rate, steps), test) for s in sets])


def draw(rows: dict[str, Tensor], path: Path) -> None:
    """Draw ten images per row."""
    figure, grid = plt.subplots(len(rows), 10, figsize=(11, 1.35 * len(rows)), layout="constrained")
    for (name, images), line in zip(rows.items(), grid, strict=True):
        # Learned pixels are unbounded, so each row has its own scale.
        extent = {"vmin": images.min().item(), "vmax": images.max().item()}
        for digit, (image, axes) in enumerate(zip(images, line, strict=True)):
            axes.imshow(image.view(8, 8).numpy(), cmap="gray", **extent)
            axes.set(xticks=[], yticks=[])
            if name == next(iter(rows)):
                axes.set_title(str(digit))
        line[0].set_ylabel(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Distil a data set into ten images.")
    parser.add_argument("--quick", action="store_true", help="take 150 outer steps with 4 networks")
    parser.add_argument("--steps", type=int, default=800, help="number of outer steps")
    parser.add_argument("--networks", type=int, default=8, help="new networks per outer step")
    parser.add_argument("--inner-steps", type=int, default=10, help="inner steps on the ten images")
    parser.add_argument("--rate", type=float, default=0.03, help="initial learning rate of the images")
    parser.add_argument("--seed", type=int, default=0, help="seed of all random numbers except the split of the data")
    parser.add_argument(
        "--out", "--output", type=Path, default=Path("figures/distillation_digits.png"), help="path of the figure"
    )
    parser.add_argument("--no-progress", action="store_true", help="hide the progress bar")
    options = parser.parse_args(arguments)
    if options.quick:
        options.steps, options.networks = 150, 4
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Distil, compare and draw."""
    options = parse_options(arguments)
    progress = sys.stderr.isatty() and not options.no_progress
    torch.set_num_threads(1)  # the matrices are small: more threads would only wait for each other
    training, test = load()
    print(f"{check(training, options.seed)}\n")
    distilled, rate = distil(training, options, progress)

    generator = torch.Generator().manual_seed(options.seed)
    real = [one_of_each(training, generator) for _ in range(20)]
    mean = means(training)
    print(
        f"test accuracy of networks 64-64-10 after {options.inner_steps} steps from random weights, mean ± deviation\n"
    )
    print(f"{'trained on':36}{'rate':>8}{'accuracy':>18}")

    def row(name: str, sets: Sequence[Batch], rate: float | None, steps: int = options.inner_steps) -> None:
        rate = best_rate(sets, training, steps, generator) if rate is None else rate
        found = evaluate(sets, rate, steps, test, 200 // len(sets))
        print(f"{name:36}{rate:>8.3f}{f'{found.mean():.1f} ± {found.std():.1f} %':>18}", flush=True)

    row("ten distilled images", [(distilled, CLASSES)], rate)
    row("ten random real images, 20 draws", [(images, CLASSES) for images in real], None)
    row("the ten mean images", [(mean, CLASSES)], None)
    row("all 1,000 images", [training], None)
    draw({"distilled": distilled, "real": real[0], "mean": mean}, options.out)
    print(f"\nFigure: {options.out}")


if __name__ == "__main__":
    main()
