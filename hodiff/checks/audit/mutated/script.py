"""Scripts that reproduce failing calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import resolve_name
from torch.utils._pytree import tree_unflatten

from hodiff.checks.mutations.sample import Sample

_HEAD = """\
import torch

import hodiff

inf, nan = float("inf"), float("nan")
"""

_BY_DATABASE = """\
from hodiff.checks.audit.samples import call_of

call = call_of({name!r})  # the operator as torch's database calls it
"""


class _Code(str):
    """Text whose repr is the text itself, for arguments in source code."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def script_of(name: str, op: Any, sample: Sample, *, correct: bool) -> str:
    """Return a script that runs `hodiff.check` on a call.

    Args:
        name: The operator's name in torch's database.
        op: The operator's entry.
        sample: The call.
        correct: Whether hodiff's corrections are on.

    Returns:
        A script.
    """
    own_name = resolve_name(op.op) if sample.direct else None
    named = own_name is not None and own_name.startswith("torch.")
    values = [f"x{place} = {_literal(leaf)}" for place, leaf in enumerate(sample.leaves) if isinstance(leaf, Tensor)]
    filled = [
        _Code(_argument(sample, place)) if isinstance(leaf, Tensor) else _Code(repr(leaf))
        for place, leaf in enumerate(sample.leaves)
    ]
    first, args, kwargs = tree_unflatten(filled, sample.structure)
    if named:
        written = [repr(first), *map(repr, args), *(f"{key}={value!r}" for key, value in kwargs.items())]
        call = f"{own_name}({', '.join(written)})"
    else:
        call = f"call({first!r}, {args!r}, {kwargs!r})"
    moving = ", ".join(f"x{place}" for place in sample.places)
    lines = [
        *(() if named else (_BY_DATABASE.format(name=name).rstrip(),)),
        *values,
        "",
        "",
        f"def f({moving}):",
        f"    return {call}",
        "",
        "",
        f"print(hodiff.check(f, ({moving},), order=3{'' if correct else ', correct=False'}))",
    ]
    return _HEAD + "\n".join(lines) + "\n"


def _argument(sample: Sample, place: int) -> str:
    name = f"x{place}"
    return sample.layouts[place].source.format(name) if place in sample.layouts else name


def _literal(x: Tensor) -> str:
    if x.layout != torch.strided:
        return repr(x)
    shape = f".reshape({tuple(x.shape)})" if not x.numel() else ""
    return f"torch.tensor({x.resolve_conj().resolve_neg().tolist()}, dtype={x.dtype}){shape}"
