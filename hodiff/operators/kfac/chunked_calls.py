"""Calls of layers, and a test whether the calls of one layer process separate chunks of examples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

L = TypeVar("L")


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a layer.

    Attributes:
        x: Its input, detached.
        shape: Shape of its output.
        edge: Graph edge of the output, which remains if the tensor is changed in place.
    """

    x: Tensor
    shape: torch.Size
    edge: GradientEdge


def layers_on_chunks(
    calls: Mapping[L, Sequence[Call]], outputs: Tensor, pull: Callable[[Tensor], Mapping[L, Sequence[Tensor]]]
) -> frozenset[L]:
    """Return the layers whose calls process separate, successive chunks of examples, not the same examples.

    Args:
        calls: Calls by layer.
        outputs: The model's outputs, (N, ...) or a multiple of N rows, in the order of the examples.
        pull: Gradients of the calls' outputs, each (c, *shape), for cotangents (c, *outputs).

    Returns:
        Layers whose gradients scale in each chunk by the same factor as the cotangents of that chunk.
    """
    lengths = {layer: tuple(call.shape[0] for call in each) for layer, each in calls.items() if len(each) > 1}
    candidates = {layer: sizes for layer, sizes in lengths.items() if sum(sizes) and not len(outputs) % sum(sizes)}
    found: set[L] = set()
    generator = torch.Generator().manual_seed(0)
    for sizes in dict.fromkeys(candidates.values()):
        factors = 1 + torch.rand(len(sizes), generator=generator, device=generator.device)
        repeats = torch.tensor(sizes, device="cpu") * (len(outputs) // sum(sizes))
        scales = factors.repeat_interleave(repeats).reshape(-1, *[1] * (outputs.dim() - 1)).to(outputs)
        cotangent = torch.randn(outputs.shape, generator=generator, device=generator.device).to(outputs)
        pulled = pull(torch.stack([cotangent, scales * cotangent]))
        for layer in [layer for layer, its in candidates.items() if its == sizes]:
            apart = True
            for (plain, scaled), factor in zip(pulled[layer], factors.tolist(), strict=True):
                tolerance = torch.finfo(plain.dtype).eps ** 0.5
                apart &= bool((scaled - factor * plain).norm() <= tolerance * plain.norm())
            if apart:
                found.add(layer)
    return frozenset(found)
