"""Memory of a product by route, for networks as in the paper: residual without batch norm, and vision transformer.

python papers/dagreou-2024/nearer_networks.py
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import torch_ways
from benchmarks.memory import peak_bytes
from benchmarks.objectives import Objective, TransformerLayer
from benchmarks.workloads.hvp import direction
from papers.networks import digit_images, residual_network

ROUTES = {
    "reverse-over-reverse": torch_ways.grad_of_dot,
    "forward-over-reverse": torch_ways.jvp_of_grad,
    "reverse-over-forward": torch_ways.grad_of_jvp,
}


class VisionTransformer(nn.Module):
    """Transformer that reads 16 patches of an 8x8 image, and classifies by their mean."""

    def __init__(self, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Conv2d(1, width, 2, stride=2)
        self.position = nn.Parameter(0.02 * torch.randn(16, width))
        self.layers = nn.Sequential(*(TransformerLayer(width, heads) for _ in range(layers)))
        self.output = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Compute scores (batch, 10) of images (batch, 1, 8, 8)."""
        tokens = self.embedding(images).flatten(2).mT + self.position
        return self.output(self.layers(tokens).mean(dim=1))


def main() -> None:
    """Print the memory of products in gradients, by network and route, on 64 digits."""
    torch.set_num_threads(1)
    (images, labels), _ = digit_images(64)
    torch.manual_seed(0)
    networks = {
        "residual": residual_network(4, 32, batch_norm=False),
        "vision transformer": VisionTransformer(128, 4, 2),
    }
    for name, network in networks.items():
        objective = Objective(name, network, images, labels)
        x = objective.parameters()
        v, unit = direction(x), peak_bytes(partial(torch.func.grad(objective), x))
        for route, product in ROUTES.items():
            tqdm.write(f"{name}, {route}: {peak_bytes(partial(product, objective, x, v)) / unit:.2f} gradients")


if __name__ == "__main__":
    main()
