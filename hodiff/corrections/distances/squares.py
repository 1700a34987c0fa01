r"""Functions of lengths that are smooth where the length is 0.

At 0 a length $n = \sqrt s$ has no derivative, and 0 stands for it; the chain rule would then lose what is even in $n$,
such as $n^2 = s$. Therefore tensors made of a length are remembered, for as long as they live, as

$$ T = E + O\, n, \qquad (E_1 + O_1 n)(E_2 + O_2 n) = E_1 E_2 + O_1 O_2\, s + (E_1 O_2 + O_1 E_2)\, n, $$

with smooth $E$ and $O$. A multiple of a length ($E = 0$) is so everywhere. Other functions are so at the zeros alone,
where they are differentiated as $E + O\, n$: smooth functions rightly, others by their part that is even in $n$.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hodiff.corrections.values import numbers_of
from hodiff.torch_internals.autograd.wrapped_tensors import below_transforms, is_wrapped
from hodiff.torch_internals.tensors import version_of


class Root:
    """A length with the square that it is the root of. Equal keys are of equal lengths.

    Attributes:
        square: Gives s.
        key: Which length it is, and how its elements were moved.
        kind: Of a "length", functions without a rule get second derivatives that are NaN at a kink; of an "absolute"
            value torch's, as at other kinks. A "root" has derivatives that are not finite at 0.
    """

    def __init__(self, square: Callable[[], Tensor], key: tuple[Any, ...] = (), kind: str = "length"):
        self.square = square
        self.key = key or (self,)
        self.kind = kind
        self.zero: Tensor | None = None
        self.has_zeros = False

    def zeros(self, length: Tensor) -> Tensor | None:
        """Return a mask of the zeros of the length; None if there are none, or if that is unknown."""
        if self.zero is None:
            self.zero = length.detach() == 0
            numbers = numbers_of(self.zero) if self.kind != "root" else None
            self.has_zeros = numbers is not None and bool(numbers.any())
        return self.zero if self.has_zeros else None


@dataclass(frozen=True)
class Graded:
    """Parity of a tensor $E + O n$ in a length $n$.

    Attributes:
        itself: A weak reference to it.
        version: How often it had been written into.
        root: Of n.
        even: E, which holds where n is 0; None for 0, everywhere.
        odd: O; None for 1.
        length: n; None where it is the tensor itself.
        held: Tensors that all of that is made of, with their versions.
    """

    itself: weakref.ref[Tensor]
    version: int
    root: Root
    even: Any
    odd: Any
    length: Tensor | None
    held: tuple[tuple[Tensor, int], ...]

    def holds(self, tensor: Tensor) -> bool:
        """Whether this is of that tensor, and nothing was written into since."""
        return (
            self.itself() is tensor
            and self.version == _version(tensor)
            and all(version == _version(each) for each, version in self.held)
        )


# By the identity of the tensor.
LENGTHS: dict[int, Graded] = {}


def remembered(
    length: Tensor,
    square: Callable[[], Tensor],
    held: tuple[Tensor, ...] = (),
    *,
    of: Tensor | None = None,
    how: Any = None,
    kind: str = "length",
) -> Tensor:
    """A length, of which is remembered what it is the root of where derivatives go through it.

    Args:
        length: The length.
        square: Gives what the root is of.
        held: Tensors that the square is made of.
        of: The tensor whose length it is.
        how: What else the length depends on: lengths of one tensor for which that is equal are equal.
        kind: "length", "absolute" or "root", as of a `Root`.

    Returns:
        The length.
    """
    if torch.compiler.is_compiling():
        return length
    key = () if of is None else (id(of), _version(of), how)
    root = Root(square, key, kind)
    return remember(length, root, None, None, None, held if of is None else (*held, of))


def remember(tensor: Any, root: Root, even: Any, odd: Any, length: Any, held: tuple[Tensor, ...]) -> Any:
    """Remember what a tensor is made of where derivatives go through it."""
    if torch.compiler.is_compiling() or not (tensor.requires_grad or is_wrapped(tensor)):
        return tensor
    key = id(tensor)

    # LENGTHS is bound now, as the interpreter clears modules before the last tensors go.
    def forget(_: Any, lengths: dict[int, Graded] = LENGTHS) -> None:
        lengths.pop(key, None)

    itself = weakref.ref(tensor, forget)
    versions = tuple((each, _version(each)) for each in (*held, length) if each is not None)
    LENGTHS[key] = Graded(itself, _version(tensor), root, even, odd, length, versions)
    return tensor


def _version(tensor: Tensor) -> int:
    # A wrapper of vmap does not count.
    return version_of(below_transforms(tensor))


def find(argument: Any) -> Graded | None:
    """Return what is known of a tensor, if anything."""
    found = LENGTHS.get(id(argument))
    return found if found is not None and found.holds(argument) else None


def even_power(length: Graded, exponent: int) -> Tensor:
    """Raise a multiple of a length to an even number, by the square of the length."""
    square = length.root.square()
    power = square if exponent == 2 else square ** (exponent // 2)
    return power if length.odd is None else length.odd**exponent * power


def squared(x: Tensor) -> Tensor:
    """The square of a tensor, which may be a length."""
    found = find(x)
    if found is None or found.even is not None:
        return x.square()
    return even_power(found, 2)
