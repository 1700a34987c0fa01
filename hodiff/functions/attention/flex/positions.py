"""Functions of single positions, evaluated at all positions of a block of weights.

A function of a batch, a head, a query and a key is called once, with index tensors that `torch.func.vmap` batches over
a block. Along the indices that its result does not depend on, it is evaluated at one position only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hodiff.errors import InputError
from hodiff.torch_internals.autograd.wrapped_tensors import is_batched_innermost
from hodiff.torch_internals.wording import Wording, says

Modification = Callable[..., Tensor]
# Vectors of batch, head, query and key indices.
Indices = tuple[Tensor, Tensor, Tensor, Tensor]
Dependence = tuple[bool, bool, bool, bool]
EVERY: Dependence = (True, True, True, True)


class IndexByTensors(TorchFunctionMode):
    """Mode in which `table[i, j]` takes tensors of one number; torch reads their values, which `vmap` rejects."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Index by the operator of torch if all indices are tensors."""
        if func is Tensor.__getitem__:
            table, index = args
            indices = index if isinstance(index, tuple) else (index,)
            if all(isinstance(each, Tensor) for each in indices):
                return torch.ops.aten.index(table, list(indices))
        return func(*args, **(kwargs or {}))


class Checked:
    """A function of positions that raises if its result is not one number; messages use its name."""

    def __init__(self, name: str, function: Modification):
        self.name, self.function = name, function

    def __call__(self, *arguments: Tensor) -> Tensor:
        """Call the function and check its result."""
        try:
            result = self.function(*arguments)
        except RuntimeError as error:
            if not says(error, Wording.READS_BATCHED):
                raise
            raise InputError(
                f"flex_attention: {self.name}: expected torch functions of the score and the indices, got a function "
                "that reads their values, such as `if i > j` or `float(i)`; use torch.where(i > j, a, b)."
            ) from error
        _require_number(self.name, result, boolean=self.name == "mask_mod")
        return result


def dependence(modification: Modification, device: torch.device, *leading: Tensor) -> Dependence:
    """Find the indices, of four, on which the result of a function depends for `vmap`, whatever their values."""
    origin = torch.zeros((), dtype=torch.int64, device=device)

    def varies(place: int) -> bool:
        seen = []

        def one(index: Tensor) -> Tensor:
            indices = [origin] * 4
            indices[place] = index
            seen.append(is_batched_innermost(modification(*leading, *indices)))
            return index

        torch.func.vmap(one)(origin[None])
        return seen[0]

    with torch.no_grad(), IndexByTensors():
        return (varies(0), varies(1), varies(2), varies(3))


def everywhere(
    modification: Modification, indices: Indices, varies: Dependence, *leading: Tensor, scores: Tensor | None = None
) -> Tensor:
    """Evaluate a function at all positions of a block; the result has size 1 along indices it does not depend on.

    Args:
        modification: A function of leading arguments and four indices.
        indices: Vectors of the block's indices.
        varies: Indices on which the result may depend; all of them, if there are scores.
        *leading: Leading arguments, equal at all positions.
        scores: Leading argument with one number per position, instead of `leading`.

    Returns:
        Tensor of four dimensions.
    """
    before = (None,) * len(leading) if scores is None else (0,)
    function = modification
    for place in (3, 2, 1, 0):
        if varies[place]:
            along = tuple(0 if each == place else None for each in range(4))
            function = torch.func.vmap(function, in_dims=(*before, *along))
    given = [each if varying else each[0] for each, varying in zip(indices, varies, strict=True)]
    with IndexByTensors():
        result = function(*(leading if scores is None else (scores,)), *given)
    return result.reshape([each.shape[0] if varying else 1 for each, varying in zip(indices, varies, strict=True)])


def _require_number(name: str, result: Any, *, boolean: bool) -> None:
    """Raise if a result is not one number, or for a mask not one boolean."""
    wanted = "a boolean tensor" if boolean else "a floating-point tensor"
    if not isinstance(result, Tensor):
        raise InputError(
            f"flex_attention: {name}: expected a function that returns {wanted} with one number, got "
            f"{type(result).__name__}; use torch functions of the indices, such as torch.where."
        )
    fits = result.dtype == torch.bool if boolean else result.is_floating_point()
    if result.dim() or not fits:
        raise InputError(
            f"flex_attention: {name}: expected a function that returns {wanted} with one number, got {result.dtype} "
            "of shape "
            f"{tuple(result.shape)}; it is called for a single query and a single key."
        )
