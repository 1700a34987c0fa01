"""Blocks in the states of K-FAC and EK-FAC: their layouts as numbers for checkpoints, and their shapes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hodiff.errors import InputError
from hodiff.operators.kfac.blocks import Layout, Piece, aligned
from hodiff.optim.optimizer_states import Shapes, require_shapes


def written(layout: Layout) -> tuple[Any, ...]:
    """Convert a layout to tuples of numbers for checkpoints."""
    return layout.dim, tuple((piece.index, piece.shape, piece.transposed) for piece in layout.pieces)


def read(numbers: tuple[Any, ...]) -> Layout:
    """Convert numbers from `written` to the layout."""
    dim, pieces = numbers
    return Layout(tuple(Piece(*each) for each in pieces), dim)


def layout_in(state: Mapping[str, Any]) -> Any:
    """Return the numbers of the layout of a parameter's block, on this rank or on another; None if it has none."""
    return state.get("layout", state.get("block"))


def indices_in(state: Mapping[str, Any]) -> list[int]:
    """Return the indices of the parameters of a state's block."""
    numbers = layout_in(state)
    return [] if numbers is None else [piece.index for piece in read(numbers).pieces]


def forget_replaced(states: Sequence[dict[str, Any]], new: Sequence[dict[str, Any]], names: Iterable[str]) -> None:
    """Forget blocks that share a parameter with a new one, as after a part of a layer was frozen or unfrozen.

    Args:
        states: State of each parameter, in the order of the blocks' indices.
        new: States whose blocks are new.
        names: Names of a block's entries.
    """
    ids, covered = set(map(id, new)), {i for state in new for i in indices_in(state)}
    for state in states:
        if id(state) not in ids and not covered.isdisjoint(indices_in(state)):
            for name in (*names, "block"):
                state.pop(name, None)
    kept = {i for state in states for i in indices_in(state)}
    for i, state in enumerate(states):
        if i not in kept and "refreshes" in state:
            # The parameter begins without curvature when it is next used.
            for name in ("refreshes", "refresh_at"):
                state.pop(name, None)


def require_blocks(caller: str, loaded: Mapping[str, Any]) -> None:
    """Raise on a loaded state whose blocks do not fit the parameters, or whose factors do not fit their block."""
    numbered = [p for group in loaded["param_groups"] for p in group["params"]]
    states = {p: s for p, s in loaded["state"].items() if isinstance(p, Tensor) and isinstance(s, dict)}
    covered: set[int] = set()
    for parameter, state in states.items():
        if (numbers := layout_in(state)) is not None:
            covered |= {id(numbered[i]) for i in _parameters_of(caller, parameter, numbers, numbered)}
    require_shapes(caller, loaded, lambda parameter, group, state: _shapes(state))
    # Without any block, the state is that of another optimizer.
    bare = [p for p, state in states.items() if covered and state.get("refreshes") and id(p) not in covered]
    if bare:
        raise InputError(
            f"{caller}: load_state_dict: expected a block for each parameter with curvature, got none for a parameter "
            f"{tuple(bare[0].shape)}; the state is incomplete: load another one, or begin without it."
        )


def _parameters_of(caller: str, parameter: Tensor, numbers: Any, numbered: Sequence[Tensor]) -> list[int]:
    """Return the indices of a layout's parameters, and raise if it is not a layout of these."""
    try:
        layout = read(numbers)
        pieces = layout.pieces
        fits = (
            bool(pieces)
            and len(layout.shape) == 3
            and all(math.prod(each.shape) == numbered[each.index].numel() for each in pieces)
        )
    except (AttributeError, IndexError, TypeError, ValueError):
        fits = False
    if not fits:
        raise InputError(
            f"{caller}: load_state_dict: expected a state of parameters of the same shapes, got the block {numbers!r} "
            f"for a parameter {tuple(parameter.shape)}; load it into an optimizer of the model that it comes from, "
            "with the parameters in the same order."
        )
    return [each.index for each in pieces]


def _shapes(state: Mapping[str, Any]) -> Shapes:
    """Return the shapes of the entries of a block, whose factors may be diagonals."""
    if state.get("layout") is None:
        return {}
    groups, p, q = read(state["layout"]).shape
    found: dict[str, Sequence[int]] = {"values": (groups, p, q), "left": (groups, p, p), "right": (groups, q, q)}
    for name, n in (("A", q), ("B", p)):
        factor, inverse = state.get(name), state.get(f"{name}_inverse")
        shape = (groups, n) if isinstance(factor, Tensor) and factor.dim() == 2 else (groups, n, n)
        padded = aligned(torch.empty(shape, device="meta")).shape
        is_padded = isinstance(inverse, Tensor) and inverse.shape == padded
        found |= {name: shape, f"{name}_inverse": padded if is_padded else shape}
    # Eigenvectors of diagonals are None.
    absent = {name for name in ("left", "right") if state.get(name) is None}
    return {name: shape for name, shape in found.items() if name not in absent}
