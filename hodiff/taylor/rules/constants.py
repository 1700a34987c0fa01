"""Rules for functions that are constant between jumps, and for writing to tensors."""

from __future__ import annotations

from typing import Any

import torch

from hodiff.errors import InputError
from hodiff.taylor.jet_views import assign, picks
from hodiff.taylor.jets import Jet, new_jet
from hodiff.taylor.jets_in_arguments import call, value_of
from hodiff.taylor.registry import analytic_rule, enter
from hodiff.taylor.series import Frame
from hodiff.torch_operators.operator import Kind
from hodiff.torch_operators.table import functions_of_kind


def plain(frame: Frame, func: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the function with the values of its arguments."""
    return call(func, value_of(frame, args), value_of(frame, kwargs))


for _step in functions_of_kind(Kind.STEP):
    enter(_step.name, plain, analytic=True)
# The sign of a complex number is not constant between jumps.
for _name in ("sign", "sgn"):
    enter(_name, plain)


@analytic_rule("zeros_like", "empty_like", "new_zeros", "new_empty", "new_empty_strided", "new_full", "new_ones")
def made_like(frame: Frame, func: Any, *args: Any, **kwargs: Any) -> Any:
    """Create a constant as a jet, so that jets can be written to it."""
    return new_jet(frame, [plain(frame, func, *args, **kwargs), *[None] * frame.order])


@analytic_rule("copy")
def copy(frame: Frame, func: Any, x: Any, source: Any, non_blocking: bool = False) -> Any:
    """Return the source, which copy_ writes."""
    return source


@analytic_rule("zero")
def zero(frame: Frame, func: Any, x: Any) -> Any:
    """Return zeros, which zero_ writes."""
    return torch.zeros_like(value_of(frame, x))


@analytic_rule("fill", "full_like")
def filled_with(frame: Frame, func: Any, x: Any, value: Any, **kwargs: Any) -> Any:
    """Fill a tensor of the first argument's shape with a value."""
    made: Any = torch.full_like(value_of(frame, x), 0, **kwargs)
    if isinstance(value, (Jet, torch.Tensor)):
        return made + value
    return new_jet(frame, [torch.full_like(made, value), *[None] * frame.order])


@analytic_rule(
    "item",
    "tolist",
    "numpy",
    "__array__",
    "__dlpack__",
    "cpu_numpy",
    "__float__",
    "__int__",
    "__complex__",
    "__index__",
    "__reduce_ex__",
)
def no_number(frame: Frame, func: Any, *args: Any, **kwargs: Any) -> Any:
    """Raise an error, because the result would lose the derivatives of a jet."""
    name = getattr(func, "__name__", func)
    raise InputError(
        f"jet: {_NAMES.get(name, name)} would lose the derivatives of a jet: expected torch's "
        "functions, or x.detach() for a constant."
    )


# Names of the operations in the error message.
_NAMES = {
    "__float__": "float()",
    "__int__": "int()",
    "__complex__": "complex()",
    "__index__": "an index",
    "__array__": "NumPy",
    "__reduce_ex__": "pickling",
}


@analytic_rule("setitem")
def setitem(frame: Frame, func: Any, x: Any, index: Any, value: Any) -> None:
    """Write to the view or to the elements that the index selects."""
    source: Any = x
    shown = source[value_of(frame, index)] if isinstance(x, Jet) else x
    if isinstance(shown, Jet) and shown.base is not None and not picks(value_of(frame, index)):
        assign(shown, _without_leading_ones(value, shown.ndim))
        return
    if not isinstance(x, Jet):
        assign(x, value)
    places = torch.arange(x.value.numel(), device=x.value.device).reshape(x.value.shape)[value_of(frame, index)]
    flat = x.reshape(-1)
    value = _without_leading_ones(_tensor(value, x.value), places.ndim)
    value = torch.broadcast_to(value, places.shape).reshape(-1)
    assign(x, torch.index_copy(flat, 0, places.reshape(-1), value).reshape(x.value.shape))


def _without_leading_ones(value: Any, rank: int) -> Any:
    """Drop dimensions of one element in front, which item assignment ignores."""
    extra = getattr(value, "ndim", 0) - rank
    return value.reshape(value.shape[extra:]) if extra > 0 and max(value.shape[:extra]) == 1 else value


def _tensor(value: Any, like: torch.Tensor) -> Any:
    return (
        value.to(like.dtype)
        if isinstance(value, (Jet, torch.Tensor))
        else torch.as_tensor(value, dtype=like.dtype, device=like.device)
    )
