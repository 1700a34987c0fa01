"""Specimens of the zoo: small functions, the inputs of their check, and its expected findings."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar


@dataclass(frozen=True)
class Wrong:
    """A function with known defects.

    Attributes:
        name: What it is called, in identifiers of tests and in tables.
        function: A `torch.autograd.Function` subclass or a plain function.
        inputs: A tensor, or a tuple of arguments.
        codes: The exact set of codes that a check must find.
        options: Further arguments of the check.
    """

    name: str
    function: Callable[..., Any] | type
    inputs: Any
    codes: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Right:
    """A function without an error.

    Attributes:
        name: What it is called, in identifiers of tests.
        function: A `torch.autograd.Function` subclass or a plain function.
        inputs: A tensor, or a tuple of arguments.
        options: Further arguments of the check.
    """

    name: str
    function: Callable[..., Any] | type
    inputs: Any
    options: dict[str, Any] = field(default_factory=dict)


# Options of a check without hodiff's corrections.
BY_TORCH = {"correct": False}

Specimen = TypeVar("Specimen", Wrong, Right)


def wrong_specimens() -> list[Wrong]:
    """Return the specimens of all files of `wrong/`."""
    return _gather("wrong", Wrong)


def right_specimens() -> list[Right]:
    """Return the specimens of all files of `right/`."""
    return _gather("right", Right)


def _gather(folder: str, kind: type[Specimen]) -> list[Specimen]:
    """Collect the table `SPECIMENS` of each file."""
    found: list[Specimen] = []
    for path in sorted((Path(__file__).parent / folder).glob("*.py")):
        found += importlib.import_module(f"zoo.{folder}.{path.stem}").SPECIMENS
    names = [each.name for each in found]
    assert len(set(names)) == len(names), f"each {kind.__name__} needs a name of its own: {sorted(names)}"
    return found
