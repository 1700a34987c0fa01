"""Networks and data that several scripts use: residual networks, and the digits as images."""

from __future__ import annotations

from itertools import pairwise

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

CLASSES = 10


class Block(nn.Module):
    """Two 3x3 convolutions with an optional residual connection."""

    def __init__(self, channels: int, batch_norm: bool, residual: bool) -> None:
        super().__init__()
        self.residual = residual
        layers: list[nn.Module] = []
        for _ in range(2):
            layers.append(nn.Conv2d(channels, channels, 3, padding=1, bias=not batch_norm))
            layers += [nn.BatchNorm2d(channels, track_running_stats=False)] if batch_norm else []
            layers.append(nn.ReLU())
        self.layers = nn.Sequential(*layers[:-1])

    def forward(self, x: Tensor) -> Tensor:
        """Map images (batch, channels, height, width) to images of the same shape."""
        change = self.layers(x)
        return torch.relu(x + change if self.residual else change)


def residual_network(blocks: int, channels: int, batch_norm: bool = True, residual: bool = True) -> nn.Sequential:
    """Return a residual network for 8x8 images; batch norm uses batch statistics, weights are drawn as by He et al."""
    body = [Block(channels, batch_norm, residual) for _ in range(blocks)]
    first = [nn.Conv2d(1, channels, 3, padding=1, bias=not batch_norm)]
    norm = [nn.BatchNorm2d(channels, track_running_stats=False)] if batch_norm else []
    network = nn.Sequential(
        *first, *norm, nn.ReLU(), *body[: blocks // 2], nn.AvgPool2d(2), *body[blocks // 2 :],
        nn.AvgPool2d(4), nn.Flatten(), nn.Linear(channels, CLASSES),
    )  # fmt: skip
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
    return network


def digit_images(training: int, test: int = 0) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return shuffled images (n, 1, 8, 8) of digits with mean 0 and their labels, for training and for a test."""
    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))[: training + test]
    images = (torch.from_numpy(pixels).float() / 8 - 0.6)[order].view(-1, 1, 8, 8)
    targets = torch.from_numpy(labels)[order]
    return (images[:training], targets[:training]), (images[training:], targets[training:])


def sparse_sigmoid(widths: list[int], linear: int, links: int = 15) -> nn.Sequential:
    """Return sigmoid layers of `links` weights from N(0, 1) a unit; no sigmoid at the end or after `linear` units."""
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise(widths):
        layer = nn.Linear(fan_in, fan_out)
        count = min(links, fan_in)
        chosen = torch.rand(fan_out, fan_in).argsort(dim=1)[:, :count]
        with torch.no_grad():
            layer.weight.zero_().scatter_(1, chosen, torch.randn(fan_out, count))
            layer.bias.zero_()
        layers += [layer] if fan_out == linear else [layer, nn.Sigmoid()]
    return nn.Sequential(*layers[: -1 if isinstance(layers[-1], nn.Sigmoid) else None])
