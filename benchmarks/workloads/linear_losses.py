"""Cross-entropy of linear logits against the composition that stores all logits: time and memory of products."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.memory import Peak, peak_bytes
from benchmarks.problems import Problem
from benchmarks.race import Contestant
from benchmarks.reference import relative_error
from hodiff import functions as hf

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]

TOKENS, CLASSES = 1024, 50_257
SIZES = (256,)
PEAKS = "Peak memory, MiB: what torch hands out at once during a call, results included"


def _composition(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(x @ weight.T, target)


LOSSES: dict[str, Loss] = {"hodiff": hf.linear_cross_entropy, "composition": _composition}


def drawn(size: int, classes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return random hidden states, a weight and targets."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(TOKENS, size, generator=generator)
    weight = torch.randn(classes, size, generator=generator) / size**0.5
    return x, weight, torch.randint(classes, (TOKENS,), generator=generator)


def gradient(loss: Loss, x: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, ...]:
    """Compute the gradients of hidden states and weight."""
    leaves = x.detach().requires_grad_(), weight.detach().requires_grad_()
    return torch.autograd.grad(loss(*leaves, target), leaves)


def product(loss: Loss, x: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, ...]:
    """Compute forward, backward, and the double backward of both gradients along the inputs."""
    leaves = x.detach().requires_grad_(), weight.detach().requires_grad_()
    gradients = torch.autograd.grad(loss(*leaves, target), leaves, create_graph=True)
    return torch.autograd.grad(gradients, leaves, [each.detach() for each in leaves])


def problems(quick: bool) -> Iterator[Problem]:
    """Yield one problem per width of hidden states."""
    for size in SIZES[: 1 if quick else None]:
        inputs = drawn(size, CLASSES // 8 if quick else CLASSES)
        x, weight, target = inputs
        exact = product(_composition, x.double(), weight.double(), target)
        yield Problem(
            name=str(size),
            title=f"{len(x)} tokens, {len(weight):,} classes, hidden states of {size}",
            contestants=[
                Contestant("composition, one gradient", "unit", partial(gradient, _composition, *inputs)),
                Contestant("hodiff, double backward", "hodiff", partial(product, LOSSES["hodiff"], *inputs)),
                Contestant("composition, double backward", "torch", partial(product, _composition, *inputs)),
            ],
            error=partial(_error, exact),
            tolerance=1e-3,
        )


def _error(exact: tuple[Tensor, ...], found: Any) -> float:
    return max(relative_error(a, b) for a, b in zip(found, exact, strict=True))


def peaks(quick: bool) -> list[Peak]:
    """Measure the peak memory of gradients and products."""
    found = []
    for size in SIZES[: 1 if quick else None]:
        inputs = drawn(size, CLASSES // 8 if quick else CLASSES)
        for word, step in (("gradient", gradient), ("double backward", product)):
            for name, loss in LOSSES.items():
                peak = peak_bytes(partial(step, loss, *inputs))
                found.append(Peak(f"{word}, hidden states of {size}", name, peak / 2**20))
    return found
