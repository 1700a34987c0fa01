"""Random test vectors: isotropic, of independent columns, drawn where the generator lives."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hodiff.estimators.view import View


def _rademacher(n: int, generator: torch.Generator) -> Tensor:
    signs = torch.randint(0, 2, (n,), generator=generator, device=generator.device)
    return signs.to(torch.float32).mul_(2).sub_(1)


def _gaussian(n: int, generator: torch.Generator) -> Tensor:
    # On the CPU in float64, so that operators in float32 and float64 meet the same vectors.
    dtype = torch.float64 if generator.device.type == "cpu" else torch.float32
    return torch.randn(n, generator=generator, device=generator.device, dtype=dtype)


def _sphere(n: int, generator: torch.Generator) -> Tensor:
    vector = _gaussian(n, generator)
    return vector * (n**0.5 / torch.linalg.vector_norm(vector))


PROBES: dict[str, Callable[[int, torch.Generator], Tensor]] = {
    "rademacher": _rademacher,
    "gaussian": _gaussian,
    "sphere": _sphere,
}


def draw(view: View, kind: str, count: int, generator: torch.Generator) -> Tensor:
    """A block (n, count) of test vectors with mean 0 and covariance I, for the view's operator."""
    block = torch.empty(view.n, count, dtype=view.dtype, device=view.device)
    # One by one, so that vectors do not depend on how they are grouped.
    for column in block.unbind(1):
        column.copy_(PROBES[kind](view.n, generator))
    return block


def generator_or_default(generator: torch.Generator | None) -> torch.Generator:
    """The user's generator, or a fresh one of the CPU with seed 0, so that results repeat."""
    return torch.Generator().manual_seed(0) if generator is None else generator
