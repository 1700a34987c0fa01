"""Functions with their own derivatives: supports of their results are read from their backward."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce, wraps
from operator import or_
from typing import TYPE_CHECKING, Any

import torch
from scipy.sparse import csr_array
from torch import Tensor
from torch.autograd import Function

from hodiff.common.randomness import RandomState
from hodiff.derivatives.capture.refusals import line_now
from hodiff.errors import HodiffError
from hodiff.sparse.detection.supports import Supports, TooManyError, from_rows, identity

if TYPE_CHECKING:
    from hodiff.sparse.detection.tracking import Tracking

# Functions of these packages have the derivatives of the operators that they run, except Functions of the modules in
# `_FREE`.
_TRUE = ("torch.", "hodiff.")
_AUTHORED = "hodiff.authoring."
_FREE = (
    _AUTHORED,
    "hodiff.functions.gradients.quantization.",
    "hodiff.functions.gradients.straight_through.",
)


class _Followed(threading.local):
    """The mode that follows the Functions of a thread; None if they are not followed."""

    mode: Tracking | None = None


_followed = _Followed()


def is_followed() -> bool:
    """Whether this thread detects a pattern, so that values of tensors cannot be compared."""
    return _followed.mode is not None


@contextmanager
def following_own_derivatives(mode: Tracking) -> Iterator[None]:
    """Within the block, read supports of Functions' results in this thread from their own derivatives."""
    kinds = [kind for kind in _subclasses(Function) if kind.forward is not Function.forward and _is_free(kind)]
    before = [(kind, vars(kind).get("forward"), kind.forward) for kind in kinds]
    outer, _followed.mode = _followed.mode, mode
    try:
        for kind, _, forward in before:
            kind.forward = staticmethod(_noting_results(kind, forward))
        yield
    finally:
        for kind, own, _ in before:
            if own is None:
                del kind.forward
            else:
                kind.forward = own
        _followed.mode = outer


def _subclasses(kind: Any) -> Iterator[Any]:
    for each in kind.__subclasses__():
        yield each
        yield from _subclasses(each)


def _is_free(kind: type[Function]) -> bool:
    """Whether a Function may have other derivatives than the operators that it runs."""
    module = f"{kind.__module__}."
    return module.startswith(_FREE) or not module.startswith(_TRUE)


def _noting_results(kind: Any, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a Function's forward, so that the memory records the supports of its results."""
    is_authored = f"{kind.__module__}.".startswith(_AUTHORED)
    contexts = 1 if kind.setup_context is Function.setup_context else 0

    @wraps(forward)
    def noting_results(*args: Any) -> Any:
        mode, inputs = _followed.mode, args[contexts:]
        if mode is None or not any(_supports(mode, x) for x in inputs):
            return forward(*args)
        try:
            found = _by_backward(kind, inputs, mode)
        except HodiffError:
            raise
        except TooManyError:
            raise mode.too_dense(kind.__name__) from None
        except Exception:
            # An error of a user's rule is raised again where the derivative is computed.
            mode.unknown.setdefault(kind.__name__, line_now())
            found = None
        # Operators inside of a forward are not followed, except in authored Functions, which differentiate what they
        # save.
        outer, mode.paused = mode.paused, mode.paused or not is_authored
        try:
            results = forward(*args)
        finally:
            mode.paused = outer
        flat = results if isinstance(results, tuple) else (results,)
        for y, supports in zip(flat, _dense(inputs, flat, mode) if found is None else found, strict=True):
            if supports is not None or (isinstance(y, Tensor) and not is_authored):
                mode.memory.write(y, supports, depends=True)
        return results

    return noting_results


def _by_backward(kind: Any, inputs: Sequence[Any], mode: Tracking) -> list[Supports | None]:
    """Supports of each result of a call, from its backward; None for results without a derivative."""
    moving = [x for x in inputs if _supports(mode, x)]
    state = RandomState(moving)
    _followed.mode = None
    try:
        with torch.enable_grad():
            leaves = [_apart(x, mode).requires_grad_() for x in moving]
            copies = iter(leaves)
            # Pass copies, because no Function may write to leaves.
            given = [next(copies).clone() if _supports(mode, x) else _apart(x, mode) for x in inputs]
            results = kind.apply(*given)
            flat = results if isinstance(results, tuple) else (results,)
            own = [y for y in flat if isinstance(y, Tensor) and y.requires_grad]
            inner, cotangents = _cotangents(own, mode)
            with inner:
                gradients = torch.autograd.grad(own, leaves, cotangents, allow_unused=True) if own else ()
    finally:
        _followed.mode = mode
        state.rewind()
    mode.unknown |= inner.unknown
    rows = csr_array((inner.memory.inputs, mode.memory.inputs), dtype=bool)
    for x, gradient in zip(moving, gradients, strict=False):
        into = None if gradient is None else inner.memory.supports(gradient)
        mine = mode.memory.supports(x)
        if into is not None and mine is not None:
            rows = rows + csr_array(into.rows().T) @ mine.rows()
    parts = iter(_split(rows, own))
    return [next(parts) if isinstance(y, Tensor) and y.requires_grad else None for y in flat]


def _cotangents(results: Sequence[Tensor], mode: Tracking) -> tuple[Tracking, list[Tensor]]:
    """Return a mode that follows operators from the results' cotangents on, and the cotangents."""
    inner = type(mode)(mode.caller, sum(y.numel() for y in results), at_point=mode.at_point)
    cotangents, start = [torch.ones_like(y) for y in results], 0
    for cotangent in cotangents:
        count = cotangent.numel()
        own = identity(count, inner.memory.inputs, start).reshape(*cotangent.shape)
        inner.memory.write(cotangent, own, depends=True)
        start += count
    return inner, cotangents


def _split(rows: csr_array, results: Sequence[Tensor]) -> Iterator[Supports]:
    start = 0
    for y in results:
        yield from_rows(rows[start : start + y.numel()], y.shape)
        start += y.numel()


def _dense(inputs: Sequence[Any], results: Sequence[Any], mode: Tracking) -> list[Supports | None]:
    """Supports in which every result depends on everything that any input does."""
    found = [supports.whole(()) for supports in (_supports(mode, x) for x in inputs) if supports]
    everything = reduce(or_, found)
    return [everything.broadcast(y.shape) if isinstance(y, Tensor) else None for y in results]


def _supports(mode: Tracking, x: Any) -> Supports | None:
    return mode.memory.supports(x) if isinstance(x, Tensor) else None


def _apart(x: Any, mode: Tracking) -> Any:
    """Copy a tensor, without supports."""
    if not isinstance(x, Tensor):
        return x
    copy = x.detach().clone()
    mode.memory.write(copy, None, depends=False)
    return copy
