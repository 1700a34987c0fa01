"""Views of jets, and writing to jets: a write to a view reaches all jets that share its memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from hodiff.errors import InputError
from hodiff.taylor.jets import Jet, jets_in, new_jet, tensor_of
from hodiff.taylor.jets_in_arguments import call
from hodiff.taylor.running import frames
from hodiff.taylor.series import Coefficient, Frame, filled
from hodiff.torch_internals.autograd.wrapped_tensors import is_wrapped
from hodiff.torch_internals.tensors import share_storage
from hodiff.torch_operators.table import OPERATORS


def watched(name: str, result: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Mark a result, or its parts, as views of the arguments whose memory they share."""
    if isinstance(result, (list, tuple)):
        parts = [_watched(name, each, k, func, args, kwargs) for k, each in enumerate(result)]
        return type(result)(parts)
    return _watched(name, result, None, func, args, kwargs)


def _watched(name: str, part: Any, k: int | None, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not isinstance(part, Jet):
        return part
    if name not in _SHARING:
        is_argument = any(each is part for each in jets_in(args))
        return new_jet(part.frame, part.in_slots(), part.support) if is_argument or part.base is not None else part
    if part.base is not None:
        return part
    for place, argument in enumerate(args):
        inside = argument if isinstance(argument, (list, tuple)) else (argument,)
        for i, base in enumerate(inside):
            if base is part:
                return part
            if not isinstance(base, Jet) or base.frame is not part.frame or not shows_memory(name, part, base, args):
                continue

            def taken(source: Any, place: int = place, i: int = i) -> Any:
                given = list(args)
                own = given[place]
                given[place] = (
                    type(own)([*own[:i], source, *own[i + 1 :]]) if isinstance(own, (list, tuple)) else source
                )
                found = call(func, given, kwargs)
                return found if k is None else found[k]

            plain = not (tensor_of(base).is_complex() or tensor_of(part).is_complex()) or name not in _TURNING
            return part.as_view(base, taken, exact=plain)
    return part


def shows_memory(name: str, part: Jet, base: Jet, args: Sequence[Any]) -> bool:
    """Whether the values of two jets share memory."""
    value, whole = tensor_of(part), tensor_of(base)
    if value is whole or name == "as_strided":
        return True
    if torch.compiler.is_compiling() or is_wrapped(value):
        # Memory cannot be inspected here; rely on what torch guarantees.
        if name == "getitem":
            return not picks(args[1])
        return name in _VIEWS or (name in _MAY_COPY and bool(whole.is_contiguous()))
    return share_storage(value, whole)


_VIEWS = {"as_strided", *(each.name for each in OPERATORS if each.view)}
# Functions whose results may share memory with an argument; rules of other functions may return an argument as it is,
# of which torch's function returns a copy.
_SHARING = {
    *(each.name for each in OPERATORS if each.linear_in),
    *("as_strided", "conj_physical", "einsum", "checkpoint", "checkpoint_sequential", "requires_grad"),
    *("dropout", "nn.dropout", "nn.dropout1d", "nn.dropout2d", "nn.dropout3d"),
}
_MAY_COPY = frozenset({"reshape", "reshape_as", "flatten", "ravel"})
# Views of complex numbers whose elements differ from the numbers in memory.
_TURNING = frozenset({"conj", "real", "imag", "view_as_real", "view_as_complex", "adjoint", "resolve_conj", "alias"})


def picks(index: Any) -> bool:
    """Whether an index selects elements by a tensor or list, so that the result is no view."""
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(each, (torch.Tensor, list)) for each in parts)


class ConstantWritten(BaseException):
    """Raised when a function writes a jet to a constant tensor, which it may have created itself."""

    def __init__(self, frame: Frame):
        super().__init__()
        self.frame = frame


def assign(target: Any, result: Any) -> Any:
    """Write a result to a jet, in place."""
    if not isinstance(target, Jet):
        if isinstance(result, Jet) and not torch.compiler.is_compiling():
            frame = frames()[result.frame.depth - 1]
            if not frame.accumulates:
                raise ConstantWritten(frame)
        raise InputError(
            f"jet: cannot write a jet to a constant tensor {tuple(target.shape)} from outside of "
            "f, such as a buffer: create that tensor by torch.zeros_like(x) or torch.clone(x) of a jet x, or combine "
            "the parts by torch.stack or torch.cat."
        )
    frame, value = target.frame, target.value
    if isinstance(result, Jet) and result.frame is frame and result.value.shape != value.shape:
        # The new dimensions of coefficients are behind their axis of directions.
        result = torch.broadcast_to(cast(Tensor, result), value.shape)
    if isinstance(result, Jet) and result.frame is frame and result.support is not None and target.base is None:
        own = result.value
        if (own.shape, own.dtype) == (value.shape, value.dtype):
            return target.write(result.in_slots(), result.support)
    new = [result] if not isinstance(result, Jet) or result.frame is not frame else result.coefficients
    new = [*new, *[None] * (frame.order + 1 - len(new))]
    spread = [
        None if each is None else torch.as_tensor(each).to(value.dtype).expand(frame.shape(k, value.shape))
        for k, each in enumerate(new)
    ]
    _write(target, spread)
    return target


def _write(target: Jet, new: list[Coefficient]) -> None:
    """Write coefficients to a jet; for a view, write them to the elements of the base that it shows."""
    base, taken = target.base, target.taken
    if base is None or taken is None:
        target.write(new)
        return
    if not target.exact:
        raise InputError(
            "jet: writing to a conjugate, or to a part of complex numbers, is not supported for a jet: expected "
            "torch.complex(real, imag) of new parts."
        )
    frame, value = base.frame, base.value
    numbers: Any = torch.arange(value.numel(), device=value.device).reshape(value.shape)
    places = taken(numbers).reshape(-1).long()
    written: list[Coefficient] = []
    for k, each in enumerate(new):
        if each is None and base.coefficients[k] is None:
            written.append(None)
            continue
        whole = filled(frame, base.coefficients, k, value)
        part = torch.zeros((), dtype=value.dtype, device=value.device) if each is None else each
        flat = whole.reshape(*frame.shape(k, ()), -1)
        part = part.expand(frame.shape(k, target.value.shape)).reshape(*frame.shape(k, ()), -1)
        written.append(flat.index_copy(-1, places, part).reshape(whole.shape))
    _write(base, written)
