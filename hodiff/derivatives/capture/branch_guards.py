"""Operators in captured graphs that raise if a number that the function read leads to another branch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx.node import has_side_effect

# Operators live as long as the library that defines them.
_LIBRARY = torch.library.Library("hodiff", "FRAGMENT")


class OtherBranchError(Exception):
    """A graph was run with numbers for which the function would take another branch.

    Args:
        where: The line that read the number.
        known: The value that the graph was made for.
        found: The value now.
    """

    def __init__(self, where: str, known: Any, found: Any):
        super().__init__(f"{where} read {known!r}, and now {found!r}")
        self.where, self.known, self.found = where, known, found


def _require(x: Tensor, number: Any, where: str) -> None:
    found = x.item()
    # NaN equals nothing, but matches NaN here.
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

# `require(x, number, where)` raises unless the one element of x is that number.
require = torch.ops.hodiff.require.default
# `indices(mask, count, where)` is `mask.nonzero()`, and raises unless it has `count` rows.
indices = torch.ops.hodiff.indices.default

# Dead code elimination must keep them although nothing uses their results.
CONDITIONS = tuple(map(has_side_effect, (require, indices)))
