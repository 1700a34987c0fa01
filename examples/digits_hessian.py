"""The curvature of a small network that classifies digits, before and after training.

    python examples/digits_hessian.py

With `--hidden 8`, the script draws the figure of the README.

A wrong second derivative looks like a right one, so this script computes it in independent ways: the whole Hessian H,
Hessian-vector products by four routes, and a block of H by SciPy's finite differences, which do not use automatic
differentiation. If any results disagree, it prints an error and ends with exit status 1.
"""

import argparse
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from statistics import median

import matplotlib as mpl
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.func import functional_call
from tqdm import tqdm

import hodiff
import hodiff.plot
from hodiff.checks import along_directions, scipy_hessian

mpl.use("Agg")
import matplotlib.pyplot as plt

Parameters = dict[str, Tensor]
Loss = Callable[[Parameters], Tensor]

ROUTES_AGREE_TO = 1e-10  # relative; float64 carries 16 digits
SCIPY_AGREES_TO = 1e-7  # relative, in addition to the error that SciPy estimates


def load_images(seed: int) -> list[Tensor]:
    """Return training images, test images, training labels and test labels; pixels are from 0 to 1."""
    pixels, labels = load_digits(return_X_y=True)
    split = train_test_split(pixels / 16, labels, train_size=512, random_state=seed, stratify=labels)
    return [torch.from_numpy(part) for part in split]


def make_network(hidden: int) -> nn.Module:
    """Return a network with one hidden layer of tanh, in float64."""
    layers = OrderedDict(hidden=nn.Linear(64, hidden), tanh=nn.Tanh(), output=nn.Linear(hidden, 10))
    return nn.Sequential(layers).double()


def train(network: nn.Module, images: Tensor, labels: Tensor, steps: int, progress: bool) -> None:
    """Train by Adam on the whole training set."""
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
    for _ in tqdm(range(steps), desc="training", leave=False, disable=not progress):
        optimizer.zero_grad()
        F.cross_entropy(network(images), labels).backward()
        optimizer.step()


def measure_curvature(loss: Loss, parameters: Parameters, progress: bool) -> tuple[dict[str, float], Tensor, Tensor]:
    """Compute the Hessian in every way; return the rows of the table, the Hessian and its eigenvalues."""
    v = {name: torch.randn_like(parameter) for name, parameter in parameters.items()}
    gradients = time_product(loss, parameters, v)
    start = time.perf_counter()
    H = hodiff.hessian_matrix(loss, parameters, progress=progress)
    seconds = time.perf_counter() - start
    eigenvalues = torch.linalg.eigvalsh(H)
    rows = {
        **compare_routes(loss, parameters, v, H @ flatten(v)),
        **compare_with_scipy(loss, parameters, H),
        "largest eigenvalue": eigenvalues[-1].item(),
        "smallest eigenvalue": eigenvalues[0].item(),
        "time of H, seconds": seconds,
        "time of a product, in gradients": gradients,
    }
    return rows, H, eigenvalues


def compare_routes(loss: Loss, parameters: Parameters, v: Parameters, expected: Tensor) -> dict[str, float]:
    """Compare products with v by all routes with the product of the dense Hessian."""
    rows = {}
    for route in hodiff.ROUTES:
        product = flatten(hodiff.hvp(loss, parameters, v, route=route))
        distance = ((product - expected).norm() / expected.norm()).item()
        rows[f"{route}, distance from H v"] = distance
        if not distance <= ROUTES_AGREE_TO:
            raise hodiff.CheckError(f"{route} is {distance:.1e} away from H v, more than {ROUTES_AGREE_TO}.")
    return rows


def compare_with_scipy(loss: Loss, parameters: Parameters, H: Tensor) -> dict[str, float]:
    """Compare the block of the output's bias, the last ten parameters, with finite differences of the loss."""
    bias = parameters["output.bias"]
    tolerances = {"atol": 1e-9, "rtol": 1e-6}
    estimate = scipy_hessian(lambda bias: loss({**parameters, "output.bias": bias}), bias, tolerances=tolerances)
    scale = estimate.matrix.abs().max()
    distance = ((H[-10:, -10:] - estimate.matrix).abs().max() / scale).item()
    error = (estimate.error.max() / scale).item()
    if not distance <= error + SCIPY_AGREES_TO:
        raise hodiff.CheckError(f"H is {distance:.1e} away from SciPy, which is good to {error:.1e}.")
    return {"SciPy's bias block, distance from H": distance, "SciPy's own estimate of its error": error}


def time_product(loss: Loss, parameters: Parameters, v: Parameters) -> float:
    """Return the time of a product over the time of a gradient, measured in turn."""

    def gradient() -> None:
        leaves = {name: parameter.detach().requires_grad_() for name, parameter in parameters.items()}
        torch.autograd.grad(loss(leaves), list(leaves.values()))

    return median(seconds_of(lambda: hodiff.hvp(loss, parameters, v)) / seconds_of(gradient) for _ in range(20))


def seconds_of(run: Callable[[], object]) -> float:
    """Return the time of one call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def flatten(tree: Parameters) -> Tensor:
    """Return all entries in one vector, in the order of the Hessian's rows."""
    return torch.cat([leaf.flatten() for leaf in tree.values()])


def print_table(columns: dict[str, dict[str, float]]) -> None:
    """Print one row per quantity and one column per moment."""
    first, *_ = columns.values()
    print(f"{'':44}" + "".join(f"{moment:>17}" for moment in columns))
    for label in first:
        print(f"{label:44}" + "".join(f"{column[label]:>17.3g}" for column in columns.values()))


def plot_curvature(H: Tensor, parameters: Parameters, spectra: dict[str, Tensor], path: Path) -> None:
    """Plot the Hessian as a heat map, and eigenvalues by rank on a logarithmic axis."""
    figure, (picture, axis) = plt.subplots(1, 2, figsize=(9, 3.9), layout="constrained")
    # On a linear scale, a few large entries would leave the rest white.
    hodiff.plot.hessian(H, parameters, ax=picture, scale="root")
    picture.set_title("Hessian after training")
    for colour, (moment, eigenvalues) in enumerate(spectra.items()):
        rounding = len(eigenvalues) * torch.finfo(eigenvalues.dtype).eps * eigenvalues.abs().max()
        for name, sign, marker in (("positive", 1, "."), ("negative", -1, "x")):
            shown = (sign * eigenvalues).sort(descending=True).values
            shown = shown[shown > rounding]
            ranks = range(1, len(shown) + 1)
            axis.plot(
                ranks, shown, marker, color=f"C{colour}", markersize=4, label=f"{moment}, {name} ({len(shown):,})"
            )
    axis.set(title="eigenvalues above rounding", xlabel="rank", ylabel="magnitude", yscale="log")
    axis.legend(loc="upper right", fontsize="small")
    axis.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=88)


def parse_options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="The curvature of a small network, before and after training.")
    parser.add_argument("--hidden", type=int, default=24, help="width of the hidden layer")
    parser.add_argument("--steps", type=int, default=300, help="number of training steps")
    parser.add_argument("--output", type=Path, default=Path("figures/digits_hessian.png"), help="path of the figure")
    parser.add_argument("--seed", type=int, default=0, help="seed of the split, the initial weights and the vectors")
    parser.add_argument("--no-progress", action="store_true", help="hide progress bars")
    return parser.parse_args()


def main() -> None:
    """Measure, train, measure again, and print and plot both."""
    options = parse_options()
    progress = sys.stderr.isatty() and not options.no_progress
    torch.set_num_threads(1)  # the matrices are small: more threads would only wait for each other
    torch.manual_seed(options.seed)
    images, test_images, labels, test_labels = load_images(options.seed)
    network = make_network(options.hidden)
    size = sum(parameter.numel() for parameter in network.parameters())
    print(f"{len(images):,} images of digits, network 64-{options.hidden}-10, {size:,} parameters, float64\n")

    def loss(parameters: Parameters) -> Tensor:
        return F.cross_entropy(functional_call(network, parameters, (images,)), labels)

    point = {name: parameter.detach() for name, parameter in network.named_parameters()}
    few = along_directions(loss, point, size=0.1)
    print(f"{hodiff.assert_differentiable(few, torch.zeros(2, dtype=torch.float64), vmap=False).summary}\n")

    columns, spectra = {}, {}
    for moment, steps in (("before training", 0), ("after training", options.steps)):
        train(network, images, labels, steps, progress)
        parameters = {name: parameter.detach().clone() for name, parameter in network.named_parameters()}
        accuracy = (network(test_images).argmax(dim=1) == test_labels).double().mean().item()
        rows, H, spectra[moment] = measure_curvature(loss, parameters, progress)
        columns[moment] = {"training loss": loss(parameters).item(), "test accuracy": accuracy, **rows}

    print_table(columns)
    plot_curvature(H, parameters, spectra, options.output)
    print(f"\nFigure: {options.output}")


if __name__ == "__main__":
    try:
        main()
    except hodiff.CheckError as disagreement:
        sys.exit(f"Derivatives disagree: {disagreement}")
