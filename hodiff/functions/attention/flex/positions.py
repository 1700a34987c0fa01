"""Functions of single positions, evaluated at all positions of a block of weights.

A function of a batch, a head, a query and a key is called once, with index tensors that `torch.func.vmap` runs through
a block. Along the indices that its result does not depend on it is evaluated at one place only.
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
# By batch, head, query and key.
Indices = tuple[Tensor, Tensor, Tensor, Tensor]
Dependence = tuple[bool, bool, bool, bool]
EVERY: Dependence = (True, True, True, True)


class IndexByTensors(TorchFunctionMode):
    """Inside, `table[i, j]` takes tensors of one number, which torch would read as numbers and `vmap` would refuse."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Take what is indexed by tensors alone by the operator that does so."""
        if func is Tensor.__getitem__:
            table, index = args
            indices = index if isinstance(index, tuple) else (index,)
            if all(isinstance(each, Tensor) for each in indices):
                return torch.ops.aten.index(table, list(indices))
        return func(*args, **(kwargs or {}))


class Checked:
    """A function of positions that refuses, by its name, results that are not one number."""

    def __init__(self, name: str, function: Modification):
        self.name, self.function = name, function

    def __call__(self, *arguments: Tensor) -> Tensor:
        """Its result."""
        try:
            result = self.function(*arguments)
        except RuntimeError as error:
            if not says(error, Wording.READS_BATCHED):
                raise
            raise InputError(
                f"flex_attention: {self.name}: expected torch functions of the score and the indices alone, got one "
                "that reads a number of theirs, as `if i > j` or `float(i)` do; torch.where(i > j, a, b) chooses "
                "between values."
            ) from error
        _require_number(self.name, result, boolean=self.name == "mask_mod")
        return result


def dependence(modification: Modification, device: torch.device, *leading: Tensor) -> Dependence:
    """By which of the four indices the result of a function varies, as `vmap` sees it, whatever the numbers are."""
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
    """The results at all positions of a block, of size 1 along indices that they do not vary by.

    Args:
        modification: A function of four indices, and of what comes before them.
        indices: The indices of the block, each a vector.
        varies: By which of them the result may vary; by all of them, if there are scores.
        *leading: Its first arguments, the same at all positions.
        scores: Its first argument, one for each position, in place of those.

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
    """Refuse what is not one number, or for a mask one boolean."""
    wanted = "a boolean tensor" if boolean else "a floating-point tensor"
    if not isinstance(result, Tensor):
        raise InputError(
            f"flex_attention: {name}: expected it to return {wanted} of one number, got "
            f"{type(result).__name__}; torch functions of the indices return one, such as torch.where."
        )
    fits = result.dtype == torch.bool if boolean else result.is_floating_point()
    if result.dim() or not fits:
        raise InputError(
            f"flex_attention: {name}: expected it to return {wanted} of one number, got {result.dtype} of shape "
            f"{tuple(result.shape)}; it is called for a single query and a single key."
        )
