"""Copies and pickles of operators, without recorded graphs, which are recorded again on first use."""

from __future__ import annotations

from typing import Any, ClassVar, TypeVar

from hodiff.errors import InputError

A = TypeVar("A", bound="Portable")


class Portable:
    """An object with recorded graphs among its attributes, which can be neither copied deeply nor pickled."""

    # Names of the attributes that hold recorded graphs.
    _recorded: ClassVar[tuple[str, ...]] = ()

    def _restore(self) -> None:
        """Record these attributes again."""
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
            f"{caller}: process_group: expected none in an operator that is copied or pickled, got a group of "
            "torch.distributed, which belongs to this process; make the operator anew."
        )
