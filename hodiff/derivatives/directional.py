"""Directional derivatives by nested forward mode, which shares no code with Taylor series."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hodiff.common.ordinary import ordinary_tree
from hodiff.common.trees import PyTree, tensors_in
from hodiff.derivatives.bound_function import bind
from hodiff.derivatives.products_by_route import Leaves
from hodiff.derivatives.route_choice import follow
from hodiff.derivatives.transforms import push


def nested_directional_derivatives(
    f: Callable[..., Any], x: PyTree, v: PyTree, *args: Any, order: int, correct: bool = True
) -> tuple[PyTree, ...]:
    """Compute `hodiff.directional_derivatives` by nested forward mode: 2^k in time and memory, but for any function."""
    function = bind("directional_derivatives", f, (x, *args), name="x", correct=correct, complex_too=True)
    tangents = function.tangents(v)

    def tower(height: int) -> Callable[[Leaves], tuple[tuple[PyTree, ...], PyTree]]:
        """Return the value and derivatives up to an order, as a function that the next order differentiates."""
        if height == 0:
            return lambda leaves: ((function(leaves)[0],), ())

        def taller(leaves: Leaves) -> tuple[tuple[PyTree, ...], PyTree]:
            directions = _moving(tangents, leaves) if torch.compiler.is_compiling() else tangents
            values, slopes, _ = push(tower(height - 1), (leaves,), (directions,))
            return (*values, slopes[-1]), ()

        return taller

    found = follow("forward", "directional_derivatives", lambda _: tower(order)(function.leaves)[0])
    # The value may be any tensor that f reads.
    return ordinary_tree(found, (*tensors_in(found[0]), *function.leaves, *tangents))


def _moving(tangents: Leaves, leaves: Leaves) -> Leaves:
    """Return the tangents with zero derivatives with respect to the leaves, where torch would make its own zeros."""
    # Torch's zeros have no memory, and a traced third forward pass writes into them: "more than one element of the
    # written-to tensor refers to a single memory location".
    pairs = zip(leaves, tangents, strict=True)
    return tuple(torch.where(torch.zeros_like(x, dtype=torch.bool), x, v) for x, v in pairs)
