"""Exchanges between ranks, and errors of a rank that lets the others wait for it.

A rank that raises takes part in no further exchange, so it cannot send its error. It leaves a note in the key-value
store of `torch.distributed`; an exchange that fails on another rank quotes the note.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType

import torch

from hodiff.errors import RankError
from hodiff.torch_internals.process_groups import default_store, number_of_ranks

# Path of a source file, with which the messages of gloo begin.
_OF_GLOO = "gloo/transport"
# Longest message that is quoted.
_LONGEST = 500


class _History:
    """Number of exchanges of this process, and whether it left a note after the last one."""

    exchanges = 0
    noted = False


@contextmanager
def exchanging(what: str) -> Iterator[None]:
    """Turn torch's errors of an exchange `what` into a `RankError`."""
    _History.exchanges += 1
    try:
        yield
    except (torch.OutOfMemoryError, RankError):
        raise
    except RuntimeError as error:
        raise _rank_error(what, error) from error
    # The error was handled, and other ranks no longer wait.
    if _History.noted:
        _History.noted = False
        with suppress(Exception):
            default_store().set(_key(torch.distributed.get_rank()), "")


@contextmanager
def leaving_notes(what: str = "") -> Iterator[None]:
    """Leave a note for other ranks if the code within raises; errors of exchanges `what` become a `RankError`."""
    try:
        yield
    except RankError:
        raise
    except Exception as error:
        if what and _is_of_exchange(error):
            raise _rank_error(what, error) from error
        leave_note(error)
        raise


def leave_note(error: Exception) -> None:
    """Leave a note of an error for ranks that wait for this one."""
    if isinstance(error, RankError) or number_of_ranks() == 1:
        return
    # An error of the store would hide the error itself.
    with suppress(Exception):
        message = str(error).strip()[:_LONGEST].rstrip(".")
        default_store().set(_key(torch.distributed.get_rank()), f"{type(error).__name__}: {message}")
        _History.noted = True


class IgnoringErrors:
    """Context that ignores errors of code within, unless that code exchanged tensors with other ranks.

    The others would wait in an exchange that this rank left, or meet it in a later one.
    """

    def __enter__(self) -> None:
        self._before = _History.exchanges

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """Return whether the error is ignored."""
        return isinstance(error, Exception) and _History.exchanges == self._before


def _is_of_exchange(error: Exception) -> bool:
    return isinstance(error, getattr(torch.distributed, "DistError", ())) or _OF_GLOO in str(error)


def _rank_error(what: str, error: Exception) -> RankError:
    reason = str(error).strip().splitlines()[0].rstrip(".")
    return RankError(
        f"{what}: expected all ranks of the device mesh to take part, and an exchange with them failed. {_note()}. "
        f"torch says: {reason}."
    )


def _note() -> str:
    """Return the error that another rank noted."""
    with suppress(Exception):  # the store may have ended with its rank
        store, own = default_store(), torch.distributed.get_rank()
        for rank in set(range(number_of_ranks())) - {own}:
            # Unlike `get`, this does not wait for a note.
            if note := store.compare_set(_key(rank), "", "").decode():
                return f"Rank {rank} raised {note}"
    return "Another rank raised an error, stopped, or took another branch of the function: read its output first"


def _key(rank: int) -> str:
    return f"hodiff/error of rank {rank}"
