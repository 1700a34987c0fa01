"""Conversion of operators to another dtype or device: their data are converted, and products are not cast.

Copies and pickles of operators, without recorded graphs, which are recorded again on first use.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sized
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hodiff.common.trees import PyTree, describe
from hodiff.errors import InputError
from hodiff.operators.linear.spaces import Space

A = TypeVar("A", bound="Portable")


class Portable:
    """An object with recorded graphs among its attributes, which can be neither copied deeply nor pickled."""

    # Names of the attributes that hold recorded graphs.
    _recorded: ClassVar[tuple[str, ...]] = ()

    def _restore(self) -> None:
        """Record these attributes again; only classes that name attributes need it."""
        raise NotImplementedError

    def _require_portable(self) -> None:
        """Raise if a copy would be another operator, or invalid."""

    def __copy__(self: A) -> A:
        # A shallow copy is at the same point and shares recorded graphs.
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        return other

    def __getstate__(self) -> dict[str, Any]:
        self._require_portable()
        return {name: value for name, value in self.__dict__.items() if name not in self._recorded}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._restore()


def require_no_group(caller: str, process_group: Any) -> None:
    """Raise if an operator with a process group is copied or pickled."""
    if process_group is not None:
        raise InputError(
            f"{caller}: process_group: expected None in an operator that is copied or pickled, got a group of "
            "torch.distributed, which belongs to this process; create a new operator."
        )


@dataclass(frozen=True)
class Conversion:
    """A device and a floating-point dtype for tensors; None keeps the tensor's own."""

    device: torch.device | None
    dtype: torch.dtype | None

    def __call__(self, tensor: Tensor) -> Tensor:
        """Convert one tensor; integer tensors keep their dtype."""
        return tensor.to(self.device, self.dtype if tensor.is_floating_point() else None)

    def tree(self, tree: PyTree) -> PyTree:
        """Convert the tensors of a pytree."""
        return pytree.tree_map_only(Tensor, self, tree)

    def space(self, space: Space) -> Space:
        """Convert a space of vectors."""
        return replace(
            space,
            dtypes=tuple(self.dtype or each for each in space.dtypes),
            devices=tuple(self.device or each for each in space.devices),
        )

    def module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Return a converted copy of a module."""
        return copy.deepcopy(module).to(device=self.device, dtype=self.dtype)


class ConvertedData:
    """Batches that are converted during iteration."""

    def __init__(self, data: Iterable[PyTree], conversion: Conversion):
        self._data, self._conversion = data, conversion

    def __iter__(self) -> Iterator[PyTree]:
        return map(self._conversion.tree, self._data)


class SizedData(ConvertedData):
    """Converted batches whose number is known."""

    def __len__(self) -> int:
        assert isinstance(self._data, Sized)
        return len(self._data)


def converted_data(data: Iterable[PyTree] | None, conversion: Conversion) -> Iterable[PyTree] | None:
    """Return data that are converted during iteration, with a length if the data have one."""
    if data is None:
        return None
    return (SizedData if isinstance(data, Sized) else ConvertedData)(data, conversion)


def conversion_to(device: Any, dtype: Any) -> Conversion:
    """Validate the arguments of `to`; a dtype alone may be the first argument, as for tensors."""
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
