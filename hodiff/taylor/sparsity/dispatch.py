"""Dispatch of functions to rules that keep jets in slots."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from hodiff.taylor.jets import Jet
from hodiff.taylor.registry import Entry
from hodiff.taylor.series import Frame
from hodiff.taylor.sparsity.contractions import matmul, slogdet
from hodiff.taylor.sparsity.moving import moving
from hodiff.taylor.sparsity.pointwise import added, multiplied, pointwise
from hodiff.taylor.sparsity.quotients import quotient
from hodiff.taylor.sparsity.reductions import cumulative, linear, total
from hodiff.taylor.sparsity.slots import Call
from hodiff.torch_operators.operator import Kind
from hodiff.torch_operators.table import functions_of_kind


def divided(call: Call) -> Any:
    """Quotient on common slots, or a quotient that waits."""
    found = pointwise(call)
    return quotient(call) if found is NotImplemented else found


# Other rules call functions of jets, which are dispatched here in turn. Rules that read coefficients get all
# directions.
HANDLERS: dict[str, Callable[[Call], Any]] = {
    **{each.name: pointwise for each in functions_of_kind(Kind.POINTWISE)},
    **{each.name: moving for each in functions_of_kind(Kind.MOVES)},
    "add": added,
    "mul": multiplied,
    "div": divided,
    **dict.fromkeys(("sum", "mean"), total),
    **dict.fromkeys(("matmul", "rmatmul", "mm", "bmm"), matmul),
    "nn.linear": linear,
    "cumsum": cumulative,
    "linalg.slogdet": slogdet,
}


def by_slots(frame: Frame, entry: Entry, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function on jets in slots; NotImplemented if its rule takes the jets as they are."""
    handler = HANDLERS.get(entry.name)
    if handler is None or not (_in_slots(args) or _in_slots(kwargs.values())):
        return NotImplemented
    return handler(Call(frame, entry, func, args, kwargs))


def _in_slots(tree: Iterable[Any]) -> bool:
    for each in tree:
        if isinstance(each, Jet):
            if each.support is not None:
                return True
        elif isinstance(each, (list, tuple)) and _in_slots(each):
            return True
    return False
