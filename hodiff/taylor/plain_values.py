"""Compare the value of a pass with the plain value: code that asks for the very type of a tensor goes another way."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hodiff.common.module_state import untouched
from hodiff.common.randomness import RandomState
from hodiff.common.trees import flatten
from hodiff.errors import RouteError
from hodiff.recompute.reachable import cells_of, modules_in
from hodiff.taylor.jets import Jet, tensor_of
from hodiff.taylor.series import Frame
from hodiff.torch_internals.autograd.wrapped_tensors import is_batched_by_any, numbers_in

# Functions by their code and the shapes of their arguments, which were compared; those of long ago are forgotten.
_COMPARED: OrderedDict[Any, None] = OrderedDict()
_MOST = 1024


def comparison_due(frame: Frame, f: Callable[..., Any], args: Sequence[Any]) -> Any:
    """The code of a function and the shapes of its arguments if it was not compared at such ones, else None."""
    if torch.compiler.is_compiling():
        return None
    leaves = pytree.tree_leaves(list(args))
    forms = tuple((type(each), each.shape, each.dtype) if isinstance(each, Tensor) else type(each) for each in leaves)
    key = (_code(f), forms, frame.mode is None)
    return None if key in _COMPARED else key


def _code(value: Any, depth: int = 5) -> Any:
    """What two callables share that run the same code, whatever numbers they use."""
    if not depth:
        return None
    if isinstance(value, FunctionType):
        return (value.__code__, tuple(_code(cell.cell_contents, depth - 1) for _, cell in cells_of(value)))
    if isinstance(value, MethodType):
        return (_code(value.__func__, depth - 1), _code(value.__self__, depth - 1))
    if isinstance(value, partial):
        return (_code(value.func, depth - 1), *(_code(each, depth - 1) for each in value.args))
    if isinstance(value, nn.Module):
        return weakref.ref(value), value.training
    return value if isinstance(value, (bool, str, type(None))) else type(value)


def compare(
    key: Any,
    frame: Frame,
    f: Callable[..., Any],
    args: Sequence[Any],
    found: tuple[Sequence[Any], Any],
    state: RandomState,
) -> None:
    """Refuse a function whose value in a pass is another than that of tensors.

    Args:
        key: What `comparison_due` said.
        frame: The pass.
        f: The function.
        args: Its arguments, with jets.
        found: The values of the pass, and their structure.
        state: The random numbers before the pass.

    Raises:
        RouteError: If it is, beyond rounding.
    """
    values, spec = found
    after = RandomState(_tensors(values), foreign=True)

    def plain(rounding: float = 0.0) -> tuple[list[Any], Any]:
        state.rewind()
        with untouched(modules_in(f)), nullcontext() if frame.mode is None else frame.mode:
            return flatten(f(*_plain(frame, args, rounding)))

    try:
        expected, plain_spec = plain()
        if spec == plain_spec and all(map(_close, values, expected)):
            _note(key)
            return
        # Rounding, a function that is not the same at each call, and cancellation let plain values differ as well.
        others = [plain(eps)[0] for eps in (0.0, 1.0, -1.0)]
        if spec == plain_spec and all(_explained(*each) for each in zip(values, expected, *others, strict=True)):
            _note(key)
            return
    finally:
        after.rewind()
    raise RouteError(
        "jet: f: expected the same value in Taylor mode as of plain tensors, got another one: code in f asks for the "
        "type of a value, as by type(x) is torch.Tensor, and takes another branch; ask isinstance(x, torch.Tensor), or "
        f"take hodiff.hessian. Plain: {_shown(expected)}, in Taylor mode: {_shown(values)}."
    )


def _note(key: Any) -> None:
    _COMPARED[key] = None
    if len(_COMPARED) > _MOST:
        _COMPARED.popitem(last=False)


def _plain(frame: Frame, args: Sequence[Any], rounding: float) -> list[Any]:
    """Arguments as plain tensors, whose last digits are changed where asked."""

    def value_of(jet: Any) -> Any:
        if jet.frame is not frame:
            return jet
        value = jet.value.detach().clone()
        if rounding and isinstance(value, Tensor) and value.dtype.is_floating_point:
            value = value * (1 + rounding * 4 * torch.finfo(value.dtype).eps)
        return value

    return [pytree.tree_map_only(Jet, value_of, each) for each in args]


def _tensors(values: Sequence[Any]) -> list[Tensor]:
    return [each for each in map(tensor_of, values) if isinstance(each, Tensor)]


def _numbers(value: Any) -> np.ndarray | None:
    """The numbers of a value, or None where a transform has batched them."""
    value = tensor_of(value)
    if not isinstance(value, Tensor):
        return np.asarray(value)
    if is_batched_by_any(value) or value.layout != torch.strided or value.device.type == "meta":
        return None
    return numbers_in(value.double() if value.dtype == torch.bfloat16 else value)


def _close(a: Any, b: Any) -> bool:
    """Whether two values agree but for rounding."""
    one, other = _numbers(a), _numbers(b)
    if one is None or other is None:
        return True
    if one.shape != other.shape:
        return False
    with np.errstate(all="ignore"):
        scale = np.max(np.abs(other[np.isfinite(other)]), initial=0.0)
        return np.allclose(one, other, rtol=_tolerance(b), atol=_tolerance(b) * scale, equal_nan=True)


def _tolerance(value: Any) -> float:
    value = tensor_of(value)
    exact = not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex())
    return 1e-9 if exact else torch.finfo(value.dtype).eps ** 0.5


def _explained(value: Any, expected: Any, *others: Any) -> bool:
    """Whether plain values differ among themselves as much as the value of the pass does from them."""
    if _close(value, expected):
        return True
    found = [_numbers(each) for each in (value, expected, *others)]
    if any(each is None or each.shape != found[0].shape or not np.isfinite(each).all() for each in found):  # type: ignore[union-attr]
        return False
    one, plain, *rest = (each.astype(complex) for each in found)  # type: ignore[union-attr]
    spread = max((np.max(np.abs(each - plain), initial=0.0) for each in rest), default=0.0)
    return bool(np.max(np.abs(one - plain), initial=0.0) <= 100 * spread)


def _shown(values: Sequence[Any]) -> str:
    return ", ".join(str(_numbers(each)).replace("\n", " ")[:60] for each in values[:2])
