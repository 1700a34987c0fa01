"""Record of a torch operator, and the notation of the tables."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum, auto
from functools import cache
from typing import NamedTuple


class Kind(Enum):
    """How the elements of an operator's results depend on the elements of its arguments."""

    POINTWISE = auto()  # on the elements at the same place, after broadcasting
    MOVES = auto()  # each is an element of an argument, or a constant that fills the rest
    LINEAR = auto()  # jointly linear in some arguments, and none of the kinds above
    REDUCES = auto()  # on the elements along the reduced dimensions
    MATRIX = auto()  # on all elements of the matrices in the same place of the batch
    STEP = auto()  # constant between jumps
    OTHER = auto()


class Pieces(Enum):
    """Values at which a piecewise operator changes from one piece to another."""

    LINES = auto()  # where an element of one tensor is 0 or a given number; linear in between
    CURVES = auto()  # the same, with a piece that is not linear
    ARGUMENTS = auto()  # where an element of one of several tensors is 0, or equals that of another
    ELEMENTS = auto()  # where elements of one tensor are equal


# Aliases that write to their first argument.
IN_PLACE_OPERATORS = frozenset({"__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__"})


class Operator(NamedTuple):
    """A torch operator.

    Attributes:
        name: Name such as "relu", "nn.relu" or "linalg.inv". A plain name stands for the functions of torch and of
            torch.nn.functional, and the method. Operators without a function are "aten." and their plain name.
        aliases: Other names of the same function.
        kind: Its kind.
        parameters: Names of the parameters of a function that is linear in some arguments; a last name with `*` takes
            all further arguments.
        linear_in: Parameters in which it is jointly linear.
        view: Whether its results always share the memory of an argument.
        smooth: Whether it is a function of one tensor, and numbers, that is smooth wherever it is finite.
        pieces: Where its pieces meet, if it is piecewise and has derivatives on the pieces.
    """

    name: str
    aliases: tuple[str, ...] = ()
    kind: Kind = Kind.OTHER
    parameters: tuple[str, ...] = ()
    linear_in: frozenset[str] = frozenset()
    view: bool = False
    smooth: bool = False
    pieces: Pieces | None = None

    @property
    def short_names(self) -> Iterator[str]:
        """Yield the names of its functions in Python, which its operators in `torch.ops.aten` have, too."""
        for each in {self.name, *self.aliases} - IN_PLACE_OPERATORS:
            yield each.removeprefix("nn.").removeprefix("aten.").replace(".", "_")


@cache
def _parameters(signature: str) -> tuple[tuple[str, ...], frozenset[str]]:
    """Read the parameters of a signature, and those in which the operator is linear."""
    given = signature.split(",") if signature else []
    return tuple(each.rstrip("!") for each in given), frozenset(each.strip("*!") for each in given if "!" in each)


def operators(
    kind: Kind,
    table: str,
    *,
    linear: bool = False,
    view: bool = False,
    smooth: bool = False,
    pieces: Pieces | None = None,
) -> tuple[Operator, ...]:
    """Read a table of operators, `name=alias(parameter!, parameter)`; `!` marks parameters that enter linearly."""
    # Without parameters, a linear operator is linear in its first argument.
    default = "input!" if linear else ""
    found = []
    for word in table.replace(", ", ",").split():
        names, _, signature = word.rstrip(")").partition("(")
        name, *aliases = names.split("=")
        found.append(Operator(name, tuple(aliases), kind, *_parameters(signature or default), view, smooth, pieces))
    return tuple(found)
