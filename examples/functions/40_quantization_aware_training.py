r"""Lesson 40: quantization-aware training, down to int8 weights.

$$ \hat w = s \, \operatorname{clamp}\big(\operatorname{round}(w / s), -q, q\big), \qquad
   \bar w = m \, \bar{\hat w}, \quad \dot{\hat w} = m \, \dot w, \qquad m = [\,|w| \le (q + \tfrac{1}{2}) \, s\,] $$

An int8 layer stores integers from -q to q = 127, and one step s. During training, its weights are rounded to that grid
and back to floating point, and gradients pass straight through (lesson 28), except for clipped weights. The network
thus learns with its rounding errors. After training, `main` converts it to torch's own int8 layers, and prints size,
accuracy and speed. The same with 2 bits, q = 1, shows why training matters: a network whose weights are only rounded to
three values loses its accuracy, and training recovers nearly all of it.

`hodiff.nn.quantization.FakeQuantize` also learns the step sizes (examples/quantized_digits.py). Torch warns that its
quantized tensors are deprecated, and `compare` silences the warning.

    python examples/functions/40_quantization_aware_training.py

Exercise: write `quantize_rows(w, bits)`: one step for each row of a matrix, as small as the row allows, so that its
largest number has the largest integer $2^{bits-1} - 1$. Gradients pass straight through; the steps are constants.
"""

from __future__ import annotations

import io
import time
import warnings
from typing import Any

import torch
import torch.ao.nn.quantized as int8
import torch.nn.functional as F
from lesson_tools import print_table
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.autograd import Function

import hodiff
from hodiff.functions import nestable_jvp

INPUTS = (torch.tensor([0.5, -1.2, 3.0], dtype=torch.float64), 0.01, 127)
HIGHEST = {8: 127, 2: 1}  # largest integer, by bits


class FakeQuantized(Function):
    """Rounding to a grid, straight through inside its range. Saves the input."""

    generate_vmap_rule = True

    @staticmethod
    def forward(w: Tensor, step: float, highest: int) -> Tensor:
        """Round to the grid, and back."""
        return step * (w / step).round().clamp(-highest, highest)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float, int], output: Tensor) -> None:
        """Save the tensor, and keep the numbers."""
        w, ctx.step, ctx.highest = inputs
        ctx.save_for_backward(w)
        ctx.save_for_forward(w)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None, None]:
        """Return the cotangent of numbers that were not clipped."""
        (w,) = ctx.saved_tensors
        return inside(w, ctx.step, ctx.highest) * cotangent, None, None

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        """Return the tangent of numbers that were not clipped."""
        (w,) = ctx.saved_tensors
        return inside(w, ctx.step, ctx.highest) * tangent


def inside(w: Tensor, step: float, highest: int) -> Tensor:
    """Return a mask of numbers that are not clipped."""
    return w.abs() <= (highest + 0.5) * step


class QuantizedLinear(nn.Linear):
    """Linear layer whose weight is on a grid; the largest initial weight sets the end of the grid."""

    def __init__(self, linear: nn.Linear, bits: int):
        super().__init__(linear.in_features, linear.out_features)
        self.load_state_dict(linear.state_dict())
        self.highest = HIGHEST[bits]
        self.step = linear.weight.abs().max().item() / self.highest
        self.largest = 0.0  # largest output so far, which sets the scale of the activations

    def forward(self, x: Tensor) -> Tensor:
        """Multiply by the quantized weights."""
        y = F.linear(x, FakeQuantized.apply(self.weight, self.step, self.highest), self.bias)
        self.largest = max(self.largest, y.detach().abs().max().item())
        return y

    def convert(self) -> int8.Linear:
        """Return torch's layer with int8 weights; inputs and outputs are integers from 0 to 255, with 128 for zero."""
        layer = int8.Linear(self.in_features, self.out_features)
        weight = torch.quantize_per_tensor(self.weight.detach(), self.step, 0, torch.qint8)
        layer.set_weight_bias(weight, self.bias.detach())
        layer.scale, layer.zero_point = self.largest / 127, 128
        return layer


def make_network() -> nn.Sequential:
    """Return three linear layers with rectifiers between them."""
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


def train(network: nn.Module, images: Tensor, labels: Tensor, steps: int, rate: float) -> None:
    """Run Adam on batches of 128."""
    optimizer = torch.optim.Adam(network.parameters(), lr=rate)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        batch = torch.randint(len(images), (128,), generator=generator)
        optimizer.zero_grad()
        F.cross_entropy(network(images[batch]), labels[batch]).backward()
        optimizer.step()


def quantized(network: nn.Sequential, bits: int) -> nn.Sequential:
    """Return the network with weights on a grid."""
    return nn.Sequential(*(QuantizedLinear(each, bits) if isinstance(each, nn.Linear) else each for each in network))


def converted(network: nn.Sequential) -> nn.Sequential:
    """Return the network with integers inside; pixels are quantized in 255 steps from 0 to 1."""
    layers = [layer.convert() if isinstance(layer, QuantizedLinear) else layer for layer in network]
    return nn.Sequential(int8.Quantize(1 / 255, 0, torch.quint8), *layers, int8.DeQuantize())


@torch.no_grad()
def measure(network: nn.Module, images: Tensor, labels: Tensor) -> dict[str, float]:
    """Return accuracy in percent, size in kilobytes, and milliseconds for all images, the best of ten."""
    stored = io.BytesIO()
    torch.save(network.state_dict(), stored)
    seconds = []
    for _ in range(10):
        start = time.perf_counter()
        outputs = network(images)
        seconds.append(time.perf_counter() - start)
    accuracy = 100 * (outputs.argmax(1) == labels).double().mean().item()
    return {"accuracy": accuracy, "kilobytes": stored.tell() / 1000, "milliseconds": 1000 * min(seconds)}


def compare(steps: int = 300) -> dict[str, dict[str, float]]:
    """Train in float32, then with few bits, and measure all networks on test digits."""
    torch.manual_seed(0)
    pixels, targets = load_digits(return_X_y=True)
    images, labels = torch.from_numpy(pixels / 16).float(), torch.from_numpy(targets)
    networks = {"float32": make_network()}
    train(networks["float32"], images[:1200], labels[:1200], steps, 0.003)
    for bits in (2, 8):
        networks[f"rounded, {bits} bits"] = quantized(networks["float32"], bits)
        networks[f"trained, {bits} bits"] = quantized(networks["float32"], bits)
        train(networks[f"trained, {bits} bits"], images[:1200], labels[:1200], steps // 3, 0.002)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*quantized tensor creation functions.*deprecated")
        networks["int8"] = converted(networks["trained, 8 bits"])
        return {name: measure(each, images[1200:], labels[1200:]) for name, each in networks.items()}


def draw(figure: Any) -> None:
    """The grid of an int8 weight, enlarged: values are steps, and the slope used is 1, and 0 outside."""
    axes = figure.add_subplot()
    w = torch.linspace(1.235, 1.285, 501, dtype=torch.float64)
    axes.plot(w, FakeQuantized.apply(w, 0.01, 127), label="value, step 0.01")
    axes.plot(w, w.clamp(max=1.275), "--", label="surrogate")
    axes.axvline(1.275, color="gray", linewidth=0.7, label="gradients end here")
    axes.set_xlabel("w")
    axes.legend()


def main() -> hodiff.Report:
    """Print what int8 costs and saves, and check the routes of FakeQuantized against each other."""
    torch.set_num_threads(1)
    measured = compare()
    rows = [(name, *(f"{each:,.2f}" for each in numbers.values())) for name, numbers in measured.items()]
    print_table(("network", *measured["int8"]), rows)
    small, large = measured["int8"], measured["float32"]
    print(f"int8 is {large['kilobytes'] / small['kilobytes']:.1f} times smaller", end=" and ")
    print(f"{large['milliseconds'] / small['milliseconds']:.1f} times faster")
    report = hodiff.check(FakeQuantized, INPUTS, order=3, approximate=True)
    print(report)
    return report


if __name__ == "__main__":
    main()
