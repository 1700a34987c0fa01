"""Copies of operators, and pickles: what is recorded stays behind, and is made again on first use."""

from __future__ import annotations

from typing import Any, ClassVar, TypeVar

from hodiff.errors import InputError

A = TypeVar("A", bound="Portable")


class Portable:
    """An object with recorded graphs among its attributes, which can be neither copied deeply nor pickled."""

    # The attributes that hold them.
    _recorded: ClassVar[tuple[str, ...]] = ()

    def _restore(self) -> None:
        """Make those attributes anew."""
        raise NotImplementedError

    def _require_portable(self) -> None:
        """Refuse where the copy would be another operator, or none."""

    def __copy__(self: A) -> A:
        # A shallow copy is at the same point and shares what is recorded.
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
    """Refuse to take the group of an operator elsewhere."""
    if process_group is not None:
        raise InputError(
            f"{caller}: process_group: expected none in an operator that is copied or pickled, got a group of "
            "torch.distributed, which belongs to this process; make the operator anew."
        )
