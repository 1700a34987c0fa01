"""Train a network whose weights and activations have few bits, and compare it with full precision.

    python examples/quantized_digits.py

The data are the digits of scikit-learn, 64 pixels each. Every weight and every hidden activation of the quantized
network takes one of 2^bits values. `FakeQuantize` rounds in the forward pass, passes gradients straight through, and
learns the step sizes. If its test accuracy falls more than one percentage point below full precision, the script ends
with exit status 1.
"""

import argparse
import sys

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from tqdm import tqdm

from hodiff.nn.quantization import FakeQuantize

ALLOWED_LOSS = 1.0  # percentage points


class QuantizedLinear(nn.Linear):
    """Linear layer with quantized weight and input, and a bias that is not quantized."""

    def __init__(self, inputs: int, outputs: int, bits: int):
        super().__init__(inputs, outputs)
        self.quantize_weight = FakeQuantize(bits).initialize_(self.weight)
        self.quantize_input = FakeQuantize(bits, symmetric=False, scale=1 / (2**bits - 1))

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to quantized numbers."""
        return F.linear(self.quantize_input(x), self.quantize_weight(self.weight), self.bias)


def load_images(seed: int) -> list[Tensor]:
    """Return training images, test images, training labels and test labels; pixels are from 0 to 1."""
    pixels, labels = load_digits(return_X_y=True)
    split = train_test_split(pixels / 16, labels, test_size=0.3, random_state=seed, stratify=labels)
    images, test_images, labels, test_labels = (torch.from_numpy(part) for part in split)
    return [images.float(), test_images.float(), labels, test_labels]


def make_network(hidden: int, bits: int | None) -> nn.Module:
    """Return a network with two hidden layers, which is quantized throughout if `bits` is given."""

    def linear(inputs: int, outputs: int) -> nn.Module:
        return nn.Linear(inputs, outputs) if bits is None else QuantizedLinear(inputs, outputs, bits)

    return nn.Sequential(linear(64, hidden), nn.ReLU(), linear(hidden, hidden), nn.ReLU(), linear(hidden, 10))


def train(network: nn.Module, images: Tensor, labels: Tensor, steps: int, title: str, progress: bool) -> None:
    """Run Adam on batches of 128, with a cosine schedule."""
    optimizer = torch.optim.Adam(network.parameters(), lr=0.003)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    generator = torch.Generator().manual_seed(0)
    for _ in tqdm(range(steps), desc=title, leave=False, disable=not progress):
        batch = torch.randint(len(images), (128,), generator=generator)
        optimizer.zero_grad()
        F.cross_entropy(network(images[batch]), labels[batch]).backward()
        optimizer.step()
        schedule.step()


@torch.no_grad()
def accuracy_of(network: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the accuracy in percent."""
    return 100 * (network(images).argmax(dim=1) == labels).double().mean().item()


def parse_options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="A quantized network against one of full precision.")
    parser.add_argument("--bits", type=int, default=4, help="bits per weight and activation")
    parser.add_argument("--hidden", type=int, default=64, help="width of the hidden layers")
    parser.add_argument("--steps", type=int, default=1000, help="number of training steps")
    parser.add_argument("--seed", type=int, default=0, help="seed of the split and the initial weights")
    parser.add_argument("--no-progress", action="store_true", help="hide progress bars")
    return parser.parse_args()


def main() -> int:
    """Train both networks; return the exit status."""
    options = parse_options()
    progress = sys.stderr.isatty() and not options.no_progress
    torch.set_num_threads(1)  # the matrices are small: more threads would only wait for each other
    images, test_images, labels, test_labels = load_images(options.seed)
    accuracies = []
    for title, bits in (("full precision", None), (f"{options.bits} bits", options.bits)):
        torch.manual_seed(options.seed)
        network = make_network(options.hidden, bits)
        train(network, images, labels, options.steps, title, progress)
        accuracies.append(accuracy_of(network, test_images, test_labels))
        print(f"test accuracy, {title:16} {accuracies[-1]:6.2f} %")
    lost = accuracies[0] - accuracies[1]
    print(f"lost by quantization  {lost:10.2f} percentage points")
    return int(lost > ALLOWED_LOSS)


if __name__ == "__main__":
    sys.exit(main())
