"""Points of operators, and checks that a point, and the data that functions close over, are constants."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hodiff.common.trees import PyTree, tensors_in
from hodiff.errors import InputError
from hodiff.recompute.closed_over import referenced
from hodiff.recompute.reachable import places, reachable
from hodiff.torch_internals.autograd.differentiation import is_observed
from hodiff.torch_internals.autograd.grad_mode import in_forward_mode
from hodiff.torch_internals.autograd.transforms import in_transform
from hodiff.torch_internals.autograd.wrapped_tensors import is_wrapped

# The advice for callers that transforms do not see through.
_ADVICE = (
    "an operator takes its point as a constant. Make it outside, or use hodiff.hvp, which the transforms see through."
)


def require_constant(caller: str, x: PyTree, *held: Any, advice: str = _ADVICE) -> None:
    """Raise if a transform or forward mode differentiates or batches a point or the data of functions."""
    if any(is_wrapped(each) or is_observed(each) for each in tensors_in(x)):
        raise InputError(
            f"{caller}: x: expected plain tensors, got one inside a torch.func transform, or a dual number of forward "
            f"mode; {advice}"
        )
    require_constants_held(caller, *held, advice=advice)


def require_constants_held(caller: str, *held: Any, advice: str = _ADVICE) -> None:
    """Raise if a transform differentiates or batches data, because products would hide them from it."""
    if (in_transform() or in_forward_mode()) and any(map(is_observed, _tensors(held))):
        raise InputError(
            f"{caller}: expected constants, got an operator or function with a tensor that an outer transform "
            f"differentiates or batches, whose derivative would be lost; {advice}"
        )


def require_no_gradients(operator: Any) -> None:
    """Raise if plain autograd would record a tensor that an operator multiplies by, in a product that hides it."""
    if torch.is_grad_enabled() and any(each.requires_grad for each in _own_tensors(operator)):
        raise InputError(
            f"{type(operator).__name__} @ v: expected an operator of constants, got one with a tensor that requires a "
            "gradient, whose derivative would be lost; detach it, or use hodiff.implicit.linear_solve for systems."
        )


def point_leaves(operator: Any) -> list[Tensor]:
    """Return the leaves of the points of an operator and of the operators in it; empty if it consists of matrices."""
    inner = [*getattr(operator, "terms", ()), *getattr(operator, "factors", ())]
    inner += [getattr(operator, name) for name in ("operator", "jacobian") if hasattr(operator, name)]
    own = getattr(getattr(operator, "point", operator), "leaves", ())
    return [*own, *(leaf for each in inner for leaf in point_leaves(each))]


def _own_tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors that an operator and its parts multiply by: factors, matrices and diagonals."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _own_tensors(each)
    elif not getattr(value, "made_of_constants", True):
        yield from _own_tensors(list(vars(value).values()))


def _tensors(held: tuple[Any, ...]) -> list[Tensor]:
    found: list[Tensor] = []
    index: dict[int, int] = {}
    for value in held:
        referenced(value, found, index)
    for each in reachable(*held):
        for get, _, _ in places(each):
            referenced(get(), found, index)
    return found
