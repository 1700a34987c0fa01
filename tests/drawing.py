"""Random numbers of the tests, in float64 unless a test names another dtype."""

from collections.abc import Callable

import torch
from torch import Generator, Tensor


def seeded(seed: int = 0) -> Generator:
    return torch.Generator().manual_seed(seed)


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return the same normal numbers in each call."""
    return torch.randn(shape, generator=seeded(seed), dtype=dtype)


def draw_each(*shapes: tuple[int, ...], seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """Return normal numbers of each shape, the same in each call."""
    generator = seeded(seed)
    return tuple(torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes)


def normals(generator: Generator) -> Callable[..., Tensor]:
    """Return a function of sizes, which draws other normal numbers in each call."""
    return lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)
