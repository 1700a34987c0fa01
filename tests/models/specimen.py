"""The definition of an architecture in the collection of models, in sizes that take seconds."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hodiff.routes import ROUTES


@dataclass(frozen=True)
class Built:
    """A model and its inputs.

    Attributes:
        model: The model, in evaluation mode, float32.
        inputs: The positional arguments.
    """

    model: nn.Module
    inputs: tuple[Any, ...]


@dataclass(frozen=True)
class Architecture:
    """A model, and the results that hodiff should report on it.

    Attributes:
        name: The name in identifiers of tests and in tables.
        build: Builds the model and its inputs.
        needs: The package of the model; empty for torch alone.
        verdict: The beginning of preflight's verdict, after `verdict: `.
        routes: The supported routes; other routes raise.
        errors: The codes of errors that a check finds.
        warnings: The codes of warnings that a check finds.
        options: Arguments of the check.
        measured: Whether products by the parameters are correct, so that they can be measured.
        coarse: Whether the model computes in float32 inside, so that products are less accurate.
        quick: Whether the quick tests include the model.
    """

    name: str
    build: Callable[[], Built]
    needs: str = ""
    verdict: str = "all four routes are right"
    routes: tuple[str, ...] = ROUTES
    errors: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    measured: bool = True
    coarse: bool = False
    quick: bool = False

    @property
    def missing(self) -> tuple[str, ...]:
        """Routes that are not supported."""
        return tuple(route for route in ROUTES if route not in self.routes)

    def made(self) -> Built:
        """Build the model with the same weights every time."""
        self.build()  # import modules that draw random numbers on import
        torch.manual_seed(0)
        built = self.build()
        return Built(built.model.eval(), built.inputs)


def architectures() -> list[Architecture]:
    """Return all architectures in `architectures/`, file by file."""
    found: list[Architecture] = []
    for path in sorted((Path(__file__).parent / "architectures").glob("*.py")):
        found += importlib.import_module(f"models.architectures.{path.stem}").ARCHITECTURES
    names = [each.name for each in found]
    assert len(set(names)) == len(names), f"each architecture needs a name of its own: {sorted(names)}"
    return found


def tokens(size: int, *shape: int) -> Tensor:
    """Draw words of a vocabulary, without special tokens."""
    return torch.randint(3, size, shape, generator=torch.Generator().manual_seed(1))


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2))
