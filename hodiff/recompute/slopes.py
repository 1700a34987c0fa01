"""The gradients that a Function's backward returns for a cotangent, as a function of the tensors that it keeps.

A backward is a function of its cotangent and of the values that the Function keeps, so it can run at other values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dis import get_instructions
from itertools import compress, pairwise
from threading import local
from types import BuiltinMethodType, FunctionType, MappingProxyType
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from hodiff.common.complex_numbers import as_real
from hodiff.recompute.contents import constant_form, content_of
from hodiff.recompute.reachable import cells_of
from hodiff.torch_internals.autograd.grad_mode import in_dual_level, in_fx_trace
from hodiff.torch_internals.autograd.graph_nodes import backward_rules, function_of, operator_of, results_of

Kept = Mapping[Any, Tensor]

# Most objects that are searched: rules may name the whole program.
_MANY = 1000
# Whether a Function's rules read numbers from outside of their context.
_READS_ELSEWHERE: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()


class Schedule:
    """A schedule of checks: at the 1st, 2nd, 4th, 8th, ... occurrence of a key."""

    def __init__(self) -> None:
        self._met: WeakKeyDictionary[Any, dict[Any, int]] = WeakKeyDictionary()

    def is_due(self, owner: Any, *keys: Any) -> bool:
        """Count occurrences of an owner's keys, and return whether a key is due; always True without an owner."""
        if owner is None:
            return True
        met = self._met.get(owner)
        if met is None:
            met = self._met[owner] = {}
        due = False
        for key in keys:
            met[key] = count = met.get(key, 0) + 1
            due |= not count & (count - 1)
        return due

    def begin_again(self, owner: Any, key: Any) -> None:
        """Make a key that failed its check due at the next occurrence."""
        if owner is not None:
            self._met[owner].pop(key, None)


# Counts the calls of each Function, separately for graphs and for transforms.
SCHEDULE = Schedule()


def form_of(node: Any) -> tuple[Any, ...]:
    """Return the properties of a Function's call: needed gradients, dtypes of results, flags on its context."""
    flags = [(name, each) for name, each in getattr(node, "__dict__", {}).items() if type(each) is bool]
    dtypes = [result.dtype for result in results_of(node)]
    return tuple(getattr(node, "needs_input_grad", ())), tuple(dtypes), tuple(sorted(flags))


def kept_tensors(node: Any) -> dict[int | str, Tensor]:
    """Return the tensors that a Function saved, by index, and those on its context, by attribute."""
    try:
        saved = getattr(node, "saved_tensors", None) or ()
    except RuntimeError:  # a checkpoint recomputes them once
        return {}
    kept: dict[Any, Any] = {**dict(enumerate(saved)), **getattr(node, "__dict__", {})}
    return {key: each for key, each in kept.items() if isinstance(each, Tensor)}


def keeps_numbers(node: Any) -> bool:
    """Whether a Function keeps numbers without a graph: on its context, or where its rules read them."""
    function = function_of(node)
    return any(True for _ in precisions(node)) or (function is not None and reads_elsewhere(function))


def precisions(node: Any) -> Iterator[float]:
    """Yield the relative precision of each number, or array, that a Function keeps without a graph."""
    for value in numbers_on(node):
        if not isinstance(value, Tensor):
            yield float(np.finfo(np.asarray(value).dtype).eps)
        elif not value.requires_grad:
            yield torch.finfo(value.dtype).eps


def numbers_on(node: Any) -> Iterator[Any]:
    """Yield the tensors, arrays and numbers on a Function's context, and inside objects there."""
    yield from _numbers_in([*kept_tensors(node).values(), *getattr(node, "__dict__", {}).values()])


def reads_elsewhere(function: Any) -> bool:
    """Whether the class of a Function holds tensors or arrays, or its rules name objects that do."""
    found = _READS_ELSEWHERE.get(function)
    if found is None:
        attributes = [each for name, each in vars(function).items() if not name.startswith("__")]
        numbers = _numbers_in([*attributes, *backward_rules(function)], classes=True)
        found = _READS_ELSEWHERE[function] = any(isinstance(each, (Tensor, np.ndarray)) for each in numbers)
    return found


def _numbers_in(roots: Iterable[Any], *, classes: bool = False) -> Iterator[Any]:
    """Yield floating-point tensors, arrays and numbers among some values and inside of them."""
    # An object's class leads to the globals of all its methods, a search too slow for each gradient.
    stack = list(roots)
    seen: dict[int, Any] = {}
    while stack and len(seen) < _MANY:
        value = stack.pop()
        if isinstance(value, Tensor):
            if has_derivatives(value) and value.numel() > 0:
                yield value
        elif isinstance(value, (np.ndarray, float, complex)):
            if np.asarray(value).dtype.kind in "fc":
                yield value
        elif id(value) not in seen and (classes or not isinstance(value, type)):
            # The reference keeps the id from being reused.
            seen[id(value)] = value
            stack.extend(_held_by(value))


def _held_by(value: Any) -> Iterable[Any]:
    if isinstance(value, BuiltinMethodType):
        return [value.__self__]
    if isinstance(value, ContextVar):
        return [value.get(None)]
    if isinstance(value, MappingProxyType):
        return [*value, *value.values()]
    if isinstance(value, local):
        return vars(value).values()
    return [] if constant_form(value) is not None else content_of(value)[3]


class _Elsewhere:
    """The context of a Function, with some of the tensors that it keeps replaced."""

    def __init__(self, node: Any, kept: Kept):
        self.__dict__.update(_node=node, _kept=kept, **{k: each for k, each in kept.items() if isinstance(k, str)})

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        return tuple(self._kept.get(i, each) for i, each in enumerate(self._node.saved_tensors))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node, name)


def slope_at(node: Any, cotangents: Sequence[Any], called_as: Any = None) -> Tensor:
    """Run the backward of a node, and flatten the gradients needed by it, or by an earlier call `called_as`."""
    return _flattened(called_as or node, getattr(node, "apply", node)(*materialized(node, cotangents)))


def materialized(node: Any, cotangents: Sequence[Any]) -> list[Any]:
    """Fill in zeros for unused outputs of a node, as torch does before it calls backward."""
    results = results_of(node)
    if len(results) != len(cotangents):
        return list(cotangents)
    return [
        torch.zeros(result.shape, dtype=result.dtype, device=result.device) if each is None else each
        for each, result in zip(cotangents, results, strict=True)
    ]


def slope_elsewhere(function: Any, ctx: Any, kept: Kept, cotangents: Sequence[Any]) -> Tensor:
    """Run a backward with some of the tensors that the Function keeps replaced, and flatten the needed gradients."""
    pulled = next(backward_rules(function))(_Elsewhere(ctx, kept), *materialized(ctx, cotangents))
    return _flattened(ctx, pulled)


def _flattened(node: Any, pulled: Any) -> Tensor:
    gradients = pulled if isinstance(pulled, tuple) else (pulled,)
    needed = getattr(node, "needs_input_grad", ())
    return flat(compress(gradients, needed) if len(needed) == len(gradients) else gradients)


def flat(tensors: Iterable[Any]) -> Tensor:
    """Concatenate the real numbers of all tensors among some values to one vector."""
    numbers = [as_real(each).double().flatten() for each in tensors_among(tensors)]
    return torch.cat(numbers) if numbers else torch.zeros(1, device="cpu")


def tensors_among(values: Iterable[Any]) -> list[Tensor]:
    """Return the tensors among some values."""
    return [each for each in values if isinstance(each, Tensor)]


def has_derivatives(value: Any) -> bool:
    """Whether a value is a tensor of a dtype that has derivatives."""
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def can_run_again(function: Any) -> bool:
    """Whether a Function and its rules may be called once more, without an active trace that would record the call."""
    if function is None or in_fx_trace() or torch.compiler.is_compiling() or in_dual_level():
        return False
    # Programs are checked by their own code, and so are rules inside of transforms, which torch wraps. A rule that
    # calls `backward` would accumulate into gradients of others.
    own = function.__module__.startswith(("hodiff.recompute.", "torch.")) and not operator_of(function)
    rule = next(backward_rules(function), None)
    return not own and rule is not None and not _calls_backward(rule)


def _calls_backward(rule: Any) -> bool:
    """Whether a rule calls `backward` of a tensor, and not only of the Function that it inherits from."""
    code = getattr(rule, "__code__", None)
    if code is None or "backward" not in code.co_names:
        return False
    held = (
        {**rule.__globals__, **{name: cell.cell_contents for name, cell in cells_of(rule)}}
        if isinstance(rule, FunctionType)
        else {}
    )
    steps = [each for each in get_instructions(code) if each.opname != "CACHE"]
    owners = [held.get(before.argval) for before, each in pairwise(steps) if each.argval == "backward"]
    others = [each for each in owners if not (isinstance(each, type) and issubclass(each, torch.autograd.Function))]
    return len(others) > code.co_names.count("super")
