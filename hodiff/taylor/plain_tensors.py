"""Comparison of a pass with plain tensors: code that tests the exact type of a tensor takes another branch."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hodiff.common.module_state import untouched
from hodiff.common.randomness import RandomState
from hodiff.common.trees import flatten
from hodiff.corrections.rules.autograd.checkpoints import uncorrected
from hodiff.errors import RouteError
from hodiff.recompute.reachable import cells_of, modules_in
from hodiff.taylor.jets import Jet, tensor_of
from hodiff.taylor.series import Frame
from hodiff.torch_internals.autograd.grad_mode import saving_unhooked
from hodiff.torch_internals.autograd.wrapped_tensors import any_holds
from hodiff.torch_internals.tensors import has_numbers

# Keys of functions and argument shapes that were compared; the oldest keys are dropped.
_COMPARED: OrderedDict[Any, None] = OrderedDict()
_MOST = 1024


def comparison_due(f: Callable[..., Any], args: Sequence[Any], how: Any) -> Any:
    """Key of a function's code and argument shapes if these were not compared yet, else None."""
    if torch.compiler.is_compiling():
        return None
    key = (_code(f), *map(_form, args), how)
    return None if key in _COMPARED else key


def _form(tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return type(tree), tree.shape, tree.dtype
    if type(tree) in (tuple, list, dict):
        return tuple(map(_form, tree.values() if type(tree) is dict else tree))
    leaves = pytree.tree_leaves(tree)
    return type(tree) if len(leaves) == 1 and leaves[0] is tree else tuple(map(_form, leaves))


def _code(value: Any, depth: int = 5) -> Any:
    """Key that is equal for two callables that run the same code, regardless of the numbers they use."""
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


def surroundings(frame: Frame) -> Any:
    """Context manager that enables or disables hodiff's corrections for a frame."""
    if frame.mode is not None:
        return frame.mode
    return nullcontext() if torch.compiler.is_compiling() else uncorrected()


def compare(
    key: Any,
    frame: Frame,
    f: Callable[..., Any],
    args: Sequence[Any],
    found: tuple[Sequence[Any], Any],
    state: RandomState,
) -> None:
    """Raise an error if a pass gives another value than plain tensors, by more than rounding."""
    # `found` has the values of the pass and their structure, `state` is the random state before it.
    values, spec = found
    after = RandomState(_tensors(values), foreign=True)

    def plain(rounding: float = 0.0) -> tuple[list[Any], Any]:
        state.rewind()
        # A recomputation does not repeat the comparison, so it must save what the pass alone saves.
        with untouched(modules_in(f)), surroundings(frame), saving_unhooked():
            return flatten(f(*_plain(frame, args, rounding)))

    try:
        expected, plain_spec = plain()
        if spec == plain_spec and all(map(_close, values, expected)):
            note_compared(key)
            return
        # Plain values may also differ, because of rounding, cancellation or a function that varies between calls.
        others = [plain(eps)[0] for eps in (0.0, 1.0, -1.0)]
        if spec == plain_spec and all(_explained(*each) for each in zip(values, expected, *others, strict=True)):
            note_compared(key)
            return
    finally:
        after.rewind()
    if any(map(_is_lost, values, expected)):
        cause = "a formula of its series is not finite at this point, as 0 times infinity; move the point, or"
    else:
        cause = (
            "perhaps code in f asks for the type of a value, as by type(x) is torch.Tensor, and takes another branch "
            "(ask isinstance(x, torch.Tensor)), or the value cancels or underflows;"
        )
    raise RouteError(
        f"jet: f: expected the same value in Taylor mode as with plain tensors, got a different value: {cause} take "
        f"hodiff.hessian. Plain: {_shown(expected)}, in Taylor mode: {_shown(values)}."
    )


def _is_lost(value: Any, expected: Any) -> bool:
    """Whether the pass has NaNs where the plain value has none."""
    if not _comparable(value, expected) or not _has_numbers(value) or not _has_numbers(expected):
        return False
    return any_holds(torch.isnan(_number(value)) & ~torch.isnan(_number(expected)))


def note_compared(key: Any) -> None:
    """Record that a function was compared."""
    _COMPARED[key] = None
    if len(_COMPARED) > _MOST:
        _COMPARED.popitem(last=False)


def _plain(frame: Frame, args: Sequence[Any], rounding: float) -> list[Any]:
    """Replace the frame's jets in arguments by plain tensors, with their last digits perturbed by `rounding`."""

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


def _number(value: Any) -> Tensor:
    """Convert a value, below all jets, to double precision."""
    found = tensor_of(value)
    found = found.detach() if isinstance(found, Tensor) else torch.as_tensor(found, device="cpu")
    return found.to(torch.complex128 if found.is_complex() else torch.float64)


def _comparable(*values: Any) -> bool:
    shapes = {tuple(value.shape) if isinstance(value, Tensor) else () for value in values}
    return len(shapes) == 1


def _close(a: Any, b: Any) -> bool:
    """Whether two values agree up to rounding."""
    if not _comparable(a, b):
        return False
    kind = tensor_of(b).dtype if isinstance(b, Tensor) else torch.float64
    if not _has_numbers(a) or not _has_numbers(b):
        return True
    tolerance = torch.finfo(kind).eps ** 0.5 if kind.is_floating_point or kind.is_complex else 1e-9
    one, other = _number(a), _number(b)
    if not one.numel():
        return True
    size = torch.where(torch.isfinite(other), other, 0).abs().amax()
    far = (one - other).abs() > tolerance * (other.abs() + size)
    # The difference of infinite numbers is NaN; torch's own formulas overflow sooner than those of series.
    odd = (torch.isfinite(other) & ~torch.isfinite(one)) | (torch.isnan(one) != torch.isnan(other))
    return not any_holds(far | odd)


def _has_numbers(value: Any) -> bool:
    found = tensor_of(value)
    return not isinstance(found, Tensor) or (found.layout == torch.strided and has_numbers(found))


def _explained(value: Any, expected: Any, *others: Any) -> bool:
    """Whether the variation among plain values explains how the value of the pass differs from them."""
    if _close(value, expected):
        return True
    if not _comparable(value, expected, *others):
        return False
    one, plain, *rest = (_number(each) for each in (value, expected, *others))
    spread = torch.stack([(each - plain).abs().amax() for each in rest]).amax()
    # The negated comparison makes NaN count as unexplained.
    return not any_holds(~((one - plain).abs().amax() <= 100 * spread))


def _shown(values: Sequence[Any]) -> str:
    return ", ".join(f"{tensor_of(each)}".replace("\n", " ")[:60] for each in values[:2])
