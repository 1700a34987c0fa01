"""The table of operators, and queries on it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hodiff.torch_internals.operators import built_in_functions
from hodiff.torch_operators.linear import LINEAR
from hodiff.torch_operators.movement import MOVEMENT
from hodiff.torch_operators.operator import Kind, Operator
from hodiff.torch_operators.others import OTHERS
from hodiff.torch_operators.pointwise import POINTWISE
from hodiff.torch_operators.steps import STEPS

OPERATORS = (*POINTWISE, *MOVEMENT, *LINEAR, *STEPS, *OTHERS)
_BY_NAME = {each.name: each for each in OPERATORS}
# Other names of each operator.
ALIASES = {each.name: each.aliases for each in OPERATORS if each.aliases}

_SPACES: dict[str, Any] = {
    "linalg": torch.linalg,
    "fft": torch.fft,
    "special": torch.special,
    "nn": functional,
}


def functions_of_kind(kind: Kind) -> Iterator[Operator]:
    """Yield the operators of a kind that have functions."""
    return (each for each in OPERATORS if each.kind is kind and not each.name.startswith("aten."))


def short_names(kind: Kind, *, views: bool = True) -> set[str]:
    """Names of the functions and of the operators in `torch.ops.aten` of a kind, perhaps without views."""
    found = (each for each in OPERATORS if each.kind is kind and (views or not each.view))
    return {name for each in found for name in each.short_names}


def with_aliases(names: str) -> set[str]:
    """Names of functions and of their aliases, as Python functions have them."""
    return {short for each in names.split() for short in _BY_NAME.get(each, Operator(each)).short_names}


def functions_named(name: str, *, operators: bool = True) -> Iterator[Any]:
    """Yield torch's functions and methods of a given name, and operators in `torch.ops.aten`."""
    room, _, short = name.rpartition(".")
    spaces = (_SPACES[room],) if room else (torch, built_in_functions, Tensor, functional, torch.ops.aten)
    for space in spaces if operators or room else spaces[:-1]:
        found = getattr(space, short, None)
        if callable(found):
            yield found


def forms_of(name: str) -> list[Any]:
    """Functions and methods of an operator under all of its names, or of its in-place variant, torch's own last."""
    ending = "_" if name.endswith("_") else ""
    names = (name, *(each + ending for each in ALIASES.get(name.removesuffix("_"), ()) if not each.startswith("__")))
    return [*reversed(dict.fromkeys(found for each in names for found in functions_named(each, operators=False)))]
