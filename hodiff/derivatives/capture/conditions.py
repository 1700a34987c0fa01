"""Operators that stand in a captured graph where the function read numbers: they refuse those of another branch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx.node import has_side_effect

# Operators live as long as the library that defines them.
_LIBRARY = torch.library.Library("hodiff", "FRAGMENT")


class OtherBranchError(Exception):
    """A graph was run with numbers that would have taken the function elsewhere.

    Args:
        where: The line that read them.
        known: What the graph was made for.
        found: What is there now.
    """

    def __init__(self, where: str, known: Any, found: Any):
        super().__init__(f"{where} read {known!r}, and now {found!r}")
        self.where, self.known, self.found = where, known, found


def _require(x: Tensor, number: Any, where: str) -> None:
    found = x.item()
    # NaN is what it was, although it equals nothing.
    if found != number and not (found != found and number != number):
        raise OtherBranchError(where, number, found)


def _indices(mask: Tensor, count: int, where: str) -> Tensor:
    found = mask.nonzero()
    if len(found) != count:
        raise OtherBranchError(where, count, len(found))
    return found


_LIBRARY.define("require(Tensor x, Scalar number, str where) -> ()")
_LIBRARY.impl("require", _require, "CompositeExplicitAutograd")
_LIBRARY.impl("require", lambda x, number, where: None, "Meta")
_LIBRARY.define("indices(Tensor mask, int count, str where) -> Tensor")
_LIBRARY.impl("indices", _indices, "CompositeExplicitAutograd")
_LIBRARY.impl(
    "indices",
    lambda mask, count, where: mask.new_empty_strided((count, mask.dim()), (1, count), dtype=torch.int64),
    "Meta",
)

# `require(x, number, where)` goes on only where the one element of x is that number.
require = torch.ops.hodiff.require.default
# `indices(mask, count, where)` is `mask.nonzero()`, and goes on only where that has so many rows.
indices = torch.ops.hodiff.indices.default

# Whatever comes of them, a graph without them would run where it must not.
CONDITIONS = tuple(map(has_side_effect, (require, indices)))
