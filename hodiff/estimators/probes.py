"""Random test vectors: isotropic, with independent columns, drawn on the generator's device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hodiff.common.options import require_generator
from hodiff.estimators.view import View


def _rademacher(n: int, generator: torch.Generator) -> Tensor:
    signs = torch.randint(0, 2, (n,), generator=generator, device=generator.device)
    return signs.to(torch.float32).mul_(2).sub_(1)


def _gaussian(n: int, generator: torch.Generator) -> Tensor:
    # Draw in float64 on the CPU, so that operators in float32 and float64 get equal vectors.
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
    """Draw a block (n, count) of test vectors with mean 0 and covariance I for the view's operator."""
    block = torch.empty(view.n, count, dtype=view.dtype, device=view.device)
    # Draw one by one, so that the vectors do not depend on their grouping.
    for column in block.unbind(1):
        if view.shards is None:
            column.copy_(PROBES[kind](view.n, generator))
        else:
            column.copy_(_draw_sharded(view, kind, generator))
    return block


def _draw_sharded(view: View, kind: str, generator: torch.Generator) -> Tensor:
    """Draw this rank's part of a vector that does not depend on the number of ranks."""
    random = _rademacher if kind == "rademacher" else _gaussian
    part: Tensor = view.shards.draw(lambda count: random(count, generator).to(view.device, view.dtype))
    if kind == "sphere":
        part = part * (view.total**0.5 / view.norms(part[:, None]).item())
    return part


def generator_or_default(caller: str, generator: torch.Generator | None) -> torch.Generator:
    """Validate and return the user's generator, or a new CPU generator with seed 0, so that results repeat."""
    require_generator(caller, "generator", generator)
    return torch.Generator().manual_seed(0) if generator is None else generator
