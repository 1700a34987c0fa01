"""Objectives to differentiate: cross-entropies of small networks on fixed data, in float32."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.func import functional_call


@dataclass(frozen=True)
class Objective:
    """The mean cross-entropy of a module on fixed data, as a function of the module's parameters."""

    name: str
    module: nn.Module
    inputs: Tensor
    targets: Tensor

    def __call__(self, parameters: dict[str, Tensor]) -> Tensor:
        """Compute the loss at the given parameters."""
        return F.cross_entropy(functional_call(self.module, parameters, (self.inputs,)), self.targets)

    def parameters(self) -> dict[str, Tensor]:
        """Return the module's own parameters, detached."""
        return {name: parameter.detach() for name, parameter in self.module.named_parameters()}

    def double(self) -> Objective:
        """Return the same objective in float64."""
        inputs = self.inputs.double() if self.inputs.is_floating_point() else self.inputs
        return Objective(self.name, copy.deepcopy(self.module).double(), inputs, self.targets)

    def flat(self, vector: Tensor) -> Tensor:
        """Compute the loss as a function of all parameters in one vector."""
        parameters = self.parameters()
        pieces = vector.split([parameter.numel() for parameter in parameters.values()])
        return self({
            name: piece.view_as(parameter) for (name, parameter), piece in zip(parameters.items(), pieces, strict=True)
        })


class Attention(nn.Module):
    """Multi-head self-attention from primitives: torch's fused attention has no double backward."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.project = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Apply self-attention to tokens (batch, length, width)."""
        batch, length, width = tokens.shape
        split = self.project(tokens).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        weights = (query @ key.mT * query.shape[-1] ** -0.5).softmax(dim=-1)
        return self.output((weights @ value).transpose(1, 2).reshape(batch, length, width))


class TransformerLayer(nn.Module):
    """Attention and a two-layer network, with layer norms before both and residual connections."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, tokens: Tensor) -> Tensor:
        """Transform tokens (batch, length, width)."""
        tokens = tokens + self.attention(self.attention_norm(tokens))
        return tokens + self.mlp(self.mlp_norm(tokens))


class Transformer(nn.Module):
    """Transformer that returns class scores of every token, one row per token."""

    def __init__(self, vocabulary: int, length: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(0.02 * torch.randn(length, width))
        self.layers = nn.Sequential(*(TransformerLayer(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map token numbers (batch, length) to scores (batch * length, vocabulary)."""
        return self.output(self.norm(self.layers(self.embedding(tokens) + self.position))).flatten(0, 1)


def mlp() -> Objective:
    """784-512-512-10 with tanh on a batch of 128."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(784, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 10))
    return Objective("mlp", module, torch.randn(128, 784), torch.randint(10, (128,)))


def transformer() -> Objective:
    """2 layers of width 128 with 4 heads, on 8 sequences of 64 tokens out of 64."""
    torch.manual_seed(0)
    module = Transformer(vocabulary=64, length=64, width=128, heads=4, layers=2)
    return Objective("transformer", module, torch.randint(64, (8, 64)), torch.randint(64, (8 * 64,)))


def cnn() -> Objective:
    """Two 3x3 convolutions, to 32 and 64 channels, with ReLU and max-pooling, on 32 images of 3x32x32."""
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 8 * 8, 10),
    )
    return Objective("cnn", module, torch.randn(32, 3, 32, 32), torch.randint(10, (32,)))


NETWORKS: dict[str, Callable[[], Objective]] = {"mlp": mlp, "transformer": transformer, "cnn": cnn}


def digits(*widths: int, samples: int) -> Objective:
    """Return a tanh network of the given widths, from pixels to classes, on scikit-learn's digits.

    Args:
        *widths: Widths of all layers. A first width below 64 reads only the first pixels.
        samples: Number of images, counted from the first.

    Returns:
        The objective, named after widths and samples.
    """
    torch.manual_seed(0)
    pixels, labels = load_digits(return_X_y=True)
    layers: list[nn.Module] = []
    for fan_in, fan_out in itertools.pairwise(widths):
        layers += [nn.Linear(fan_in, fan_out), nn.Tanh()]
    inputs = torch.from_numpy(pixels / 16).float()[:samples, : widths[0]]
    name = f"digits-{'-'.join(map(str, widths))}-{samples}"
    return Objective(name, nn.Sequential(*layers[:-1]), inputs, torch.from_numpy(labels)[:samples])


# Softmax regression and a tanh network, both on 256 images and on all of them.
DIGITS: dict[str, Callable[[], Objective]] = {
    "digits-64-10-256": partial(digits, 64, 10, samples=256),
    "digits-64-10-1797": partial(digits, 64, 10, samples=1797),
    "digits-64-32-10-256": partial(digits, 64, 32, 10, samples=256),
    "digits-64-32-10-1797": partial(digits, 64, 32, 10, samples=1797),
}
