"""What a step of each of `hodiff.optim`'s optimizers costs, in gradients of the same loss, raced in one process.

python -m benchmarks.optimizers     prints the table of docs/guides/optimizers.md
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.machine import machine
from benchmarks.race import Contestant, median_ratio, race
from hodiff.optim import KFAC, SAM, SOAP, AdaHessian, NewtonCG, Shampoo, SophiaG, SophiaH

Step = Callable[[], Any]
Batch = tuple[nn.Module, Tensor, Tensor]


def mlp() -> Batch:
    """784-512-512-10, a batch of 128."""
    layers = [nn.Linear(784, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 10)]
    return nn.Sequential(*layers), torch.randn(128, 784), torch.randint(10, (128,))


class Transformer(nn.Module):
    """Two layers over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 128)
        layers = [nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True) for _ in range(2)]
        self.layers, self.head = nn.Sequential(*layers), nn.Linear(128, 64)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits, the classes in the second place."""
        logits: Tensor = self.head(self.layers(self.embedding(tokens)))
        return logits.transpose(1, 2)


def transformer() -> Batch:
    """Two layers, d = 128, 8 x 64 tokens."""
    return Transformer(), torch.randint(64, (8, 64)), torch.randint(64, (8, 64))


def loop(make: Callable[..., Any], batch: Batch, of: Callable[[nn.Module], Any] = nn.Module.parameters) -> Step:
    """A step of the ordinary loop."""
    model, inputs, labels = batch
    optimizer = make(of(model), lr=1e-6)

    def step() -> None:
        optimizer.zero_grad()
        cross_entropy(model(inputs), labels).backward()
        optimizer.step()

    return step


def known_layers(model: nn.Module) -> list[nn.Parameter]:
    """Parameters that K-FAC knows: all but those of torch's attention, which calls its layers by functions."""
    return [p for name, p in model.named_parameters() if "self_attn" not in name]


def closure(make: Callable[..., Any], batch: Batch) -> Step:
    """A step by a closure that returns the loss."""
    model, inputs, labels = batch
    optimizer = make(model.parameters(), lr=1e-6)
    return lambda: optimizer.step(lambda: cross_entropy(model(inputs), labels))


def pair(make: Callable[..., Any], batch: Batch) -> Step:
    """A step by a closure that returns outputs and their loss."""
    model, inputs, labels = batch
    optimizer = make(model.parameters(), lr=1e-6)
    return lambda: optimizer.step(lambda: (model(inputs), lambda outputs: cross_entropy(outputs, labels)))


def gradient(batch: Batch) -> Step:
    """The unit."""
    model, inputs, labels = batch
    parameters = list(model.parameters())
    return lambda: torch.autograd.grad(cross_entropy(model(inputs), labels), parameters)


NEVER = 10**9
newton = partial(NewtonCG, damping=1.0, cg_iterations=10, cg_tolerance=0.0)
WAYS: dict[str, Callable[[Batch], Step]] = {
    "gradient": gradient,
    "`torch.optim.Adam`": partial(loop, torch.optim.Adam),
    "`SophiaH`, `SophiaG` or `AdaHessian`, not due": partial(loop, partial(SophiaH, update_every=NEVER)),
    "`SophiaH`, due, loop": partial(loop, partial(SophiaH, update_every=1)),
    "`SophiaH`, due, closure": partial(closure, partial(SophiaH, update_every=1)),
    "`AdaHessian`, due, loop": partial(loop, partial(AdaHessian, update_every=1)),
    "`AdaHessian`, due, closure": partial(closure, partial(AdaHessian, update_every=1)),
    "`SophiaG`, due": partial(loop, partial(SophiaG, update_every=1)),
    "`KFAC`, not due": partial(loop, partial(KFAC, update_every=NEVER), of=known_layers),
    "`KFAC`, due for curvature": partial(loop, partial(KFAC, update_every=1, refresh_every=NEVER), of=known_layers),
    "`KFAC`, due for curvature and inverses": partial(
        loop, partial(KFAC, update_every=1, refresh_every=1), of=known_layers
    ),
    "`Shampoo`, not due": partial(loop, partial(Shampoo, refresh_every=NEVER)),
    "`Shampoo`, due for roots": partial(loop, partial(Shampoo, refresh_every=1)),
    "`SOAP`, not due": partial(loop, partial(SOAP, refresh_every=NEVER)),
    "`SOAP`, due for its basis": partial(loop, partial(SOAP, refresh_every=1)),
    "`SAM`": partial(closure, partial(SAM, base=torch.optim.SGD)),
    "`NewtonCG`, 10 iterations": partial(closure, newton),
    "`NewtonCG`, Gauss-Newton, 10 iterations": partial(pair, partial(newton, curvature="gauss-newton")),
}
WORKLOADS = {"MLP 784-512-512-10": mlp, "transformer, 2 layers, d = 128": transformer}


def main(rounds: int = 7) -> None:
    """Race and print."""
    columns = []
    for name, make in WORKLOADS.items():
        torch.manual_seed(0)
        contestants = [Contestant(way, "hodiff", of(make())) for way, of in WAYS.items()]
        seconds = race(contestants, rounds, name)
        columns.append({way: median_ratio(each, seconds["gradient"]) for way, each in seconds.items()})
    lines = [f"| a step of | {' | '.join(WORKLOADS)} |", f"|---|{'---|' * len(WORKLOADS)}"]
    lines += [f"| {way} | {' | '.join(f'{each[way]:.1f}' for each in columns)} |" for way in WAYS if way != "gradient"]
    sys.stdout.write("\n".join([str(machine()), *lines, ""]))


if __name__ == "__main__":
    main()
