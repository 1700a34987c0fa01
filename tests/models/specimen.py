"""What the zoo of models holds: architectures that people have, in sizes that take seconds."""

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
    """A model and what it is called with.

    Attributes:
        model: The model, in evaluation mode, float32.
        inputs: Its arguments by position.
    """

    model: nn.Module
    inputs: tuple[Any, ...]


@dataclass(frozen=True)
class Architecture:
    """A model with what hodiff has to say of it.

    Attributes:
        name: What it is called, in identifiers of tests and in tables.
        build: Makes it.
        needs: The package that it comes from; empty for torch alone.
        verdict: The beginning of preflight's verdict, behind `verdict: `.
        routes: The routes that are there; the others raise.
        errors: The codes of errors that a check finds.
        warnings: Those of warnings.
        options: Arguments of the check.
        measured: Whether products by its parameters are right, and so can be measured.
        coarse: Whether it computes in float32 inside, so that products are as coarse.
        quick: Whether it belongs to the quick tests, too.
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
        """The routes that are not there."""
        return tuple(route for route in ROUTES if route not in self.routes)

    def made(self) -> Built:
        """The model with the same weights every time."""
        self.build()  # to import what draws random numbers on import
        torch.manual_seed(0)
        built = self.build()
        return Built(built.model.eval(), built.inputs)


def architectures() -> list[Architecture]:
    """All of `architectures/`, file by file."""
    found: list[Architecture] = []
    for path in sorted((Path(__file__).parent / "architectures").glob("*.py")):
        found += importlib.import_module(f"models.architectures.{path.stem}").ARCHITECTURES
    names = [each.name for each in found]
    assert len(set(names)) == len(names), f"each architecture needs a name of its own: {sorted(names)}"
    return found


def tokens(size: int, *shape: int) -> Tensor:
    """Words of a vocabulary, none of which is special."""
    return torch.randint(3, size, shape, generator=torch.Generator().manual_seed(1))


def noise(*shape: int) -> Tensor:
    """Normal numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2))
