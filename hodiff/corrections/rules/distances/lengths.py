r"""Lengths (p-norms) with all derivatives 0 at 0, and a memory of the tensors that are computed from lengths.

At 0 a length $n = \sqrt s$ has no derivative, and hodiff takes 0. The chain rule would then lose terms that are even in
$n$, such as $n^2 = s$. Tensors computed from a length are therefore remembered, while they live, as

$$ T = E + O\, n, \qquad (E_1 + O_1 n)(E_2 + O_2 n) = E_1 E_2 + O_1 O_2\, s + (E_1 O_2 + O_1 E_2)\, n, $$

with smooth $E$ and $O$. A multiple of a length ($E = 0$) has this form everywhere. Other functions have it at the zeros
only, where they are differentiated as $E + O\, n$: exactly if they are smooth, else by their part that is even in $n$.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hodiff.corrections.mechanism.values import numbers_of
from hodiff.torch_internals.autograd.func_calls import carry_through_vmap
from hodiff.torch_internals.autograd.wrapped_tensors import any_holds, below_transforms, is_wrapped
from hodiff.torch_internals.interception import without_function_modes
from hodiff.torch_internals.tensors import version_of

# Power of the range of the dtype within which powers are powers of a length: derivatives of the root have the third.
_ROOT_INSIDE = 0.3


class Root:
    """A length and its square s. Lengths with equal keys are equal.

    Attributes:
        key: Identifies the length, and how its elements were moved.
        kind: For a "length", functions without a rule have NaN as second derivatives at a kink; for an "absolute" value
            they keep torch's, as at other kinks. A "root" has derivatives that are not finite at 0.
    """

    def __init__(
        self,
        square: Callable[[], Tensor],
        key: tuple[Any, ...] = (),
        kind: str = "length",
        labels: Callable[[], Tensor] | None = None,
        zeros: Callable[[], Tensor] | None = None,
    ):
        self.key = key or (object(),)  # with the root itself, it would be freed by garbage collection only
        self.kind = kind
        self.zero: Tensor | None = None
        self.has_zeros = False
        self._compute_square, self._labels, self._zeros = square, labels, zeros
        self._square: Tensor | None = None
        self._needing: tuple[Tensor | None] | None = None

    def square(self) -> Tensor:
        """Return s, the same tensor each time, as derivatives with respect to the length pass through it."""
        if self._square is not None:
            return self._square
        square = self._compute_square()
        if torch.is_grad_enabled():  # otherwise it has no graph
            self._square = square
        return square

    def needing_square(self, length: Tensor) -> Tensor | None:
        """Return a mask of the elements whose even powers are powers of s; None if there are none.

        These are the zeros, and numbers at which derivatives of the root of s leave the range of the dtype. Elsewhere
        even powers are powers of the length, so that a function may differentiate them with respect to the length.
        """
        if self._needing is None:
            self._needing = (self._find_needing(length.detach()),)
        return self._needing[0]

    def _find_needing(self, length: Tensor) -> Tensor | None:
        ends = torch.finfo(length.dtype)
        least, most = ends.tiny**_ROOT_INSIDE, ends.max**_ROOT_INSIDE
        # On other devices than a CPU, reading would have to synchronize.
        numbers = numbers_of(length) if length.is_cpu or self.kind == "root" else None
        if numbers is not None:
            low, high = numbers.aminmax()
            if low.item() > least and high.item() < most:
                return None
        needing = ~((length > least) & (length < most))
        if self._zeros is not None:  # other zeros are constants
            needing = needing & ((length != 0) | self._zeros())
            if numbers is not None and not any_holds(needing):
                return None
        return needing

    def set_zeros(self, zero: Tensor) -> None:
        """Set the mask of the zeros of the length."""
        self.zero = zero
        numbers = numbers_of(zero) if self.kind != "root" else None
        self.has_zeros = numbers is not None and bool(numbers.any())

    def label(self, length: Tensor) -> Tensor:
        """Return random numbers from [1, 2) that identify the elements of the length."""
        if self._labels is not None:
            return self._labels()
        # torch.func.vmap refuses random operations of torch.
        labels = 1 + np.random.default_rng(hash(self.key) % 2**62).random(tuple(length.shape))
        return torch.as_tensor(labels, dtype=length.dtype, device=length.device)

    def zeros(self, length: Tensor) -> Tensor | None:
        """Return a mask of the zeros of the length; None if there are none, or if that is unknown."""
        if self.zero is None:
            self.set_zeros(length.detach() == 0 if self._zeros is None else self._zeros())
        return self.zero if self.has_zeros else None


@dataclass(frozen=True)
class Graded:
    """Parity of a tensor $E + O n$ in a length $n$.

    Attributes:
        itself: A weak reference to the tensor.
        version: Version counter of the tensor when it was remembered.
        root: The length n with its square.
        even: E, which holds where n is 0; None for 0, everywhere.
        odd: O; None for 1.
        length: n; None if the tensor itself is n.
        held: Tensors from which the parity is computed, with their versions.
    """

    itself: weakref.ref[Tensor]
    version: int
    root: Root
    even: Any
    odd: Any
    length: Tensor | None
    held: tuple[tuple[Tensor, int], ...]

    def holds(self, tensor: Tensor) -> bool:
        """Whether the parity is that of the tensor, and no tensor was written to since."""
        return (
            self.itself() is tensor
            and self.version == _version(tensor)
            and all(version == _version(each) for each, version in self.held)
        )


# Parity of the remembered tensors, by their id.
LENGTHS: dict[int, Graded] = {}


def remembered(
    length: Tensor,
    square: Callable[[], Tensor],
    held: tuple[Tensor, ...] = (),
    *,
    of: Tensor | None = None,
    how: Any = None,
    kind: str = "length",
    zeros: Callable[[], Tensor] | None = None,
) -> Tensor:
    """Remember the square of a length where derivatives pass through it, and return the length."""
    # The square is computed from the tensors in `held`. Lengths `of` one tensor with equal options `how` are equal. For
    # the kinds see `Root`.
    if torch.compiler.is_compiling():
        return length
    key = () if of is None else (id(of), _version(of), how)
    root = Root(square, key, kind, zeros=zeros)
    return remember(length, root, None, None, None, held if of is None else (*held, of))


def remember(tensor: Any, root: Root, even: Any, odd: Any, length: Any, held: tuple[Tensor, ...]) -> Any:
    """Record the parity of a tensor where derivatives pass through it, and return the tensor."""
    if torch.compiler.is_compiling() or not (tensor.requires_grad or is_wrapped(tensor)):
        return tensor
    key = id(tensor)

    # LENGTHS is a default argument, because the interpreter clears modules before it frees the last tensors.
    def forget(_: Any, lengths: dict[int, Graded] = LENGTHS) -> None:
        lengths.pop(key, None)

    itself = weakref.ref(tensor, forget)
    versions = tuple((each, _version(each)) for each in (*held, length) if each is not None)
    LENGTHS[key] = Graded(itself, _version(tensor), root, even, odd, length, versions)
    return tensor


def carry(x: Tensor, result: Any, move: Callable[[Tensor], Tensor]) -> Any:
    """Remember what `torch.func.vmap` makes of a remembered tensor where it enters or leaves: the result of `move`."""
    graded = find(x) if LENGTHS else None
    if graded is None:
        return result
    length = x if graded.length is None else graded.length
    zero = graded.root.zeros(length)
    if zero is None:
        return result

    def moved(part: Any) -> Tensor:
        return move((part if isinstance(part, Tensor) else torch.as_tensor(part).to(x)).expand(x.shape))

    square, labels = moved(graded.root.square()), moved(graded.root.label(length))
    root = Root(lambda: square, (), graded.root.kind, lambda: labels)
    root.set_zeros(moved(zero))
    even, odd = (None if part is None else moved(part) for part in (graded.even, graded.odd))
    return remember(result, root, even, odd, None if graded.length is None else moved(length), ())


carry_through_vmap(carry)


def _version(tensor: Tensor) -> int:
    # A vmap wrapper does not count writes.
    return version_of(below_transforms(tensor))


def find(argument: Any) -> Graded | None:
    """Return the parity of a remembered tensor, or None."""
    found = LENGTHS.get(id(argument))
    return found if found is not None and found.holds(argument) else None


def receiver_of_a_kink(nodes: Sequence[Any]) -> Any:
    """Return the first of some nodes of a graph that receives a length with zeros; None if there is none."""
    if not (LENGTHS and nodes):
        return None
    received = {edge for node in nodes for edge in node.next_functions if edge[0] is not None}
    # Lengths of other computations are among them, which no mode of this one may see.
    with without_function_modes(TorchFunctionMode):
        edges = [
            (graded, tensor, (tensor.grad_fn, tensor.output_nr))
            for graded in list(LENGTHS.values())
            if (tensor := graded.itself()) is not None and tensor.requires_grad and graded.root.kind == "length"
        ]
    ends = set()
    for graded, tensor, edge in edges:
        if edge in received and graded.holds(tensor):
            length = tensor if graded.length is None else graded.length
            if graded.root.zeros(length) is not None:
                ends.add(edge)
    return next((node for node in nodes if not ends.isdisjoint(node.next_functions)), None) if ends else None


def even_power(length: Graded, exponent: int) -> Tensor:
    """Raise a multiple of a length to an even number, by the square of the length."""
    square = length.root.square()
    power = square if exponent == 2 else square ** (exponent // 2)
    return power if length.odd is None else length.odd**exponent * power


Change = Callable[[Tensor], Tensor]


def by_square(
    root: Root, length: Tensor, even: Callable[[], Tensor], plain: Callable[[Change], Tensor]
) -> Tensor | None:
    """Compute a product of two multiples of a length by the square of the length where that is necessary.

    Args:
        root: The length.
        length: Its value.
        even: Computes the product by the square.
        plain: Computes the product after changing the multiples of the length.

    Returns:
        The product; None if the square is nowhere necessary.
    """
    at = root.needing_square(length)
    if at is None:
        return None
    # The derivative of a "root" is infinite at 0, even if it is multiplied by 0.
    return even() if root.kind == "root" else torch.where(at, even(), plain(lambda x: torch.where(at, 1, x)))


def squared(x: Tensor) -> Tensor:
    """Square a tensor; a multiple of a length by the square of the length where that is necessary."""
    found = find(x)
    if found is None or found.even is not None:
        return x.square()
    length = x if found.length is None else found.length
    square = by_square(found.root, length, lambda: even_power(found, 2), lambda change: change(x).square())
    return x.square() if square is None else square


def root(square: Tensor, dtype: torch.dtype | None = None, *, of: Tensor | None = None, how: Any = None) -> Tensor:
    """Return the square root, with all derivatives 0 at 0, and remember the square for functions of the root."""
    zero = square == 0
    length = torch.where(zero, 0, torch.where(zero, 1, square).sqrt())
    if dtype is None or dtype == length.dtype:
        return remembered(length, lambda: square, (square,), of=of, how=how)
    return remembered(length.to(dtype), lambda: square.to(dtype), (square,), of=of, how=how)
