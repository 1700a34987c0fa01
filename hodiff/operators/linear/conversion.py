"""Operators in another dtype or on another device: what they are made of is converted, and products are not cast."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sized
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hodiff.common.trees import PyTree, describe
from hodiff.errors import InputError
from hodiff.operators.linear.spaces import Space


@dataclass(frozen=True)
class Conversion:
    """A device and a floating-point dtype for tensors; None leaves them as they are."""

    device: torch.device | None
    dtype: torch.dtype | None

    def __call__(self, tensor: Tensor) -> Tensor:
        """One tensor; those of whole numbers keep their dtype."""
        return tensor.to(self.device, self.dtype if tensor.is_floating_point() else None)

    def tree(self, tree: PyTree) -> PyTree:
        """A pytree, in which other things than tensors stay as they are."""
        return pytree.tree_map_only(Tensor, self, tree)

    def space(self, space: Space) -> Space:
        """A space of vectors."""
        return replace(
            space,
            dtypes=tuple(self.dtype or each for each in space.dtypes),
            devices=tuple(self.device or each for each in space.devices),
        )

    def module(self, module: torch.nn.Module) -> torch.nn.Module:
        """A copy of a module."""
        return copy.deepcopy(module).to(device=self.device, dtype=self.dtype)


class ConvertedData:
    """Batches, converted as they come."""

    def __init__(self, data: Iterable[PyTree], conversion: Conversion):
        self._data, self._conversion = data, conversion

    def __iter__(self) -> Iterator[PyTree]:
        return map(self._conversion.tree, self._data)


class SizedData(ConvertedData):
    """The same of data whose number of batches is known."""

    def __len__(self) -> int:
        assert isinstance(self._data, Sized)
        return len(self._data)


def converted_data(data: Iterable[PyTree] | None, conversion: Conversion) -> Iterable[PyTree] | None:
    """Data of the same length, where they have one."""
    if data is None:
        return None
    return (SizedData if isinstance(data, Sized) else ConvertedData)(data, conversion)


def conversion_to(device: Any, dtype: Any) -> Conversion:
    """The arguments of `to`, validated; a dtype alone may stand first, as for tensors."""
    if isinstance(device, torch.dtype) and dtype is None:
        device, dtype = None, device
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise InputError(f"to: dtype: expected a floating-point dtype, got {describe(dtype)}; pass torch.float64.")
    if device is not None:
        try:
            device = torch.empty(0, device=device).device
        except (TypeError, RuntimeError, AssertionError) as error:
            reason = str(error).split("\n")[0]
            raise InputError(f"to: device: expected a device of this machine, got {device!r}. {reason}.") from None
    return Conversion(device, dtype)
