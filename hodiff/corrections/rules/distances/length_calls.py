"""A call of a torch function with tensors $E + O n$ among its arguments, which are computed from a length n."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hodiff.corrections.rules.distances.graded import NotKnown
from hodiff.corrections.rules.distances.lengths import Graded, Root, remember
from hodiff.errors import HodiffWarning, levels_to_the_caller
from hodiff.torch_internals.autograd.wrapped_tensors import below_transforms


class _Notice(threading.local):
    """Switch for the interception of calls on remembered tensors; rules turn it off for their own computations."""

    on = True


NOTICE = _Notice()


@contextmanager
def noticed(on: bool) -> Iterator[None]:
    """Switch the interception of calls on remembered tensors on or off."""
    before, NOTICE.on = NOTICE.on, on
    try:
        yield
    finally:
        NOTICE.on = before


def tensors_in(*arguments: Any) -> Iterator[Tensor]:
    """Yield the tensors among arguments, and in their lists and dicts."""
    for each in arguments:
        if isinstance(each, Tensor):
            yield each
        elif isinstance(each, (tuple, list)):
            yield from tensors_in(*each)
        elif isinstance(each, dict) and each:
            yield from tensors_in(*each.values())


@dataclass(frozen=True)
class Call:
    """Call of a torch function with remembered tensors among its arguments, whose parity is `found` by their id."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    found: dict[int, Graded]
    mode: Any

    def graded(self, place: int) -> Graded | None:
        """Return the known parity of an argument, or None."""
        return self.found.get(id(self.args[place])) if place < len(self.args) else None

    def value(self, change: Callable[[Tensor], Tensor] = lambda x: x) -> Any:
        """Return the value of the call after changing its remembered tensors, without recording its parity."""

        def changed(x: Tensor) -> Tensor:
            return change(x) if id(x) in self.found else x

        args, kwargs = pytree.tree_map_only(Tensor, changed, (self.args, self.kwargs))
        with self.mode, noticed(False):
            return self.func(*args, **kwargs)

    def again(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Compute the call by another function, with the rules for remembered tensors."""
        with self.mode, noticed(True):
            return function(*args, **kwargs)

    def length(self, x: Tensor) -> Tensor:
        """Return the length n of a remembered tensor."""
        length = self.found[id(x)].length
        return x if length is None else length

    def zeros(self, x: Tensor) -> Tensor | None:
        """Return a mask of the zeros of the length of x; None if there are none."""
        return self.found[id(x)].root.zeros(self.length(x))

    def parts(self, x: Any) -> tuple[Any, Any]:
        """Return E and O of an argument where its length is 0; elsewhere its value as a constant, and 0."""
        graded = self.found.get(id(x))
        if graded is None:
            return x, None
        zero: Any = graded.root.zeros(self.length(x))
        even = torch.where(zero, 0 if graded.even is None else graded.even, x.detach())
        return even, torch.where(zero, 1 if graded.odd is None else graded.odd, torch.zeros_like(x.detach()))

    def kinks(self, x: Tensor) -> Tensor | None:
        """Return a mask of the kinks of x; None if there are none, or if that is unknown."""
        zero = self.zeros(x)
        if zero is None or self.found[id(x)].root.kind != "length":
            return None
        at = self.parts(x)[1].detach() != 0
        return at if bool(below_transforms(at).any()) else None

    def multiple(self, result: Any, graded: Graded, odd: Any, x: Tensor, *others: Any) -> Any:
        """Remember the result as a multiple of a length."""
        held = (*(each for each, _ in graded.held), *(each for each in others if isinstance(each, Tensor)))
        return remember(result, graded.root, None, odd, self.length(x), held)

    def mixed(self, x: Tensor, even: Tensor, odd: Any) -> Any:
        """Return the value of the call, with the derivatives of E + O n at zeros of the length of x."""
        graded, length = self.found[id(x)], self.length(x)
        zero: Any = self.zeros(x)
        value = self.value()
        result = torch.where(zero, even + (0 if odd is None else odd * length), value).to(value.dtype)
        root = graded.root
        if odd is None or not bool(below_transforms((odd.detach() != 0) & zero).any()):
            return result
        if result.shape != length.shape:
            root, length = _expanded(root, length, result.shape)
        return remember(result, root, even, odd, length, tuple(each for each, _ in graded.held))


def _expanded(root: Root, length: Tensor, shape: torch.Size) -> tuple[Root, Tensor]:
    square, labels = lambda: root.square().expand(shape), lambda: root.label(length).expand(shape)
    return Root(square, (*root.key, tuple(shape)), root.kind, labels), length.expand(shape)


def warn_of_kinks(name: str, cause: str) -> None:
    """Warn that second derivatives are NaN at kinks."""
    warnings.warn(
        f"{name}: {cause}, so second derivatives are NaN there. Write it as a function of the square, such as "
        "x.square().sum(), or with elementwise functions and sums of a length that is computed once.",
        HodiffWarning,
        stacklevel=levels_to_the_caller(),
    )


def refused(call: Call) -> Any:
    """Compute the value of a call, with a warning and with NaN as second derivatives at kinks."""
    warn_of_kinks(
        call.func.__name__,
        "Got a length, a distance or a deviation that is 0 somewhere, where it has a kink, and hodiff does not know "
        "whether the kink cancels",
    )

    def kinked(x: Tensor) -> Tensor:
        at = call.kinks(x)
        # Use the square, since no derivative passes through a length that is 0.
        if at is None:
            return x.view_as(x)
        return x + NotKnown.call(call.found[id(x)].root.square().expand(at.shape), at, 1).to(x.dtype)

    return call.value(kinked)
