"""States in higher precision than their parameters."""

from __future__ import annotations

from functools import partial
from itertools import chain
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree


def precise(tensor: Tensor) -> Tensor:
    """Convert a tensor to at least 32 bits."""
    return tensor.float() if tensor.dtype.itemsize < 4 else tensor


def restore(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Load states of 16-bit parameters again in at least 32 bits, as torch rounds them to the parameters' dtype."""
    numbers = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
    parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for number, parameter in zip(numbers, parameters, strict=True):
        if parameter.dtype.itemsize < 4 and number in state_dict["state"]:
            move = partial(_moved, parameter)
            optimizer.state[parameter] = pytree.tree_map_only(Tensor, move, state_dict["state"][number])


def _moved(parameter: Tensor, tensor: Tensor) -> Tensor:
    dtype = precise(parameter).dtype if tensor.is_floating_point() else tensor.dtype
    return tensor.to(parameter.device, dtype, copy=True)
