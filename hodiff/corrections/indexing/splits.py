"""Rules for `tensor_split` at indices given as a tensor, and for `flip` and `roll` of numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hodiff.corrections.declining import INVALID
from hodiff.corrections.registry import register
from hodiff.routes import ROUTES
from hodiff.torch_internals.autograd.wrapped_tensors import below_derivatives, is_wrapped


def _is_by_tensor(input: Any, tensor_indices_or_sections: Any = None, *_: Any, **__: Any) -> bool:
    return isinstance(tensor_indices_or_sections, Tensor) and not torch.compiler.is_compiling()


@register(
    torch.tensor_split,
    torch.Tensor.tensor_split,
    name="torch.tensor_split",
    kind="missing",
    routes=ROUTES,
    reason="indices that are a tensor cannot be read inside a transform",
    reference="the same split at numbers",
    covers=_is_by_tensor,
)
def _tensor_split(input: Tensor, tensor_indices_or_sections: Tensor, dim: int = 0) -> Any:
    places = below_derivatives(tensor_indices_or_sections)
    # Torch refuses indices that differ within a batch, and other dtypes.
    if is_wrapped(places) or places.dtype != torch.int64 or places.dim() > 1:
        return INVALID
    return torch.tensor_split(input, places.tolist(), dim)


def _is_number(input: Tensor, *_: Any, **__: Any) -> bool:
    return not input.dim()


def _of_number(input: Tensor, *_: Any, **__: Any) -> Tensor:
    return input.clone()


for _name, _reason in (
    ("flip", "under vmap, a tensor without dimensions is refused"),
    ("roll", "under vmap, tensors without dimensions are exchanged within a batch"),
):
    _functions = getattr(torch, _name), getattr(Tensor, _name)
    _rule = register(
        *_functions, name=f"torch.{_name}", routes=ROUTES, reason=_reason, reference="the input", covers=_is_number
    )
    _rule(_of_number)
