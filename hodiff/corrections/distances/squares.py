r"""Squares of lengths, which are smooth where the lengths are not.

At 0 a length $n = \sqrt s$ has no derivative, and 0 stands for it; so the chain rule would have 0 for the second
derivative of $n^2$. Therefore what a length is the root of is remembered for as long as the length lives, and even
powers of it, of parts of it and of its multiples are powers of $s$.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hodiff.torch_internals.autograd.wrapped_tensors import below_transforms, is_wrapped
from hodiff.torch_internals.tensors import version_of


@dataclass(frozen=True)
class Length:
    """A multiple of a root.

    Attributes:
        itself: A weak reference to it.
        version: How often it had been written into.
        square: Gives what the root is of.
        factor: By what the root was multiplied, if by anything.
        held: Tensors that the square and the factor are made of, with their versions.
    """

    itself: weakref.ref[Tensor]
    version: int
    square: Callable[[], Tensor]
    factor: Any
    held: tuple[tuple[Tensor, int], ...]

    def holds(self, length: Tensor) -> bool:
        """Whether this is of that tensor, and nothing was written into since."""
        return (
            self.itself() is length
            and self.version == _version(length)
            and all(version == _version(each) for each, version in self.held)
        )


# By the identity of the tensor.
LENGTHS: dict[int, Length] = {}


def remembered(
    length: Tensor, square: Callable[[], Tensor], factor: Any = None, held: tuple[Tensor, ...] = ()
) -> Tensor:
    """A length, of which is remembered what it is the root of where derivatives go through it.

    Args:
        length: The length, or a multiple of it.
        square: Gives what the root is of.
        factor: By what the root was multiplied.
        held: Tensors that the square and the factor are made of.

    Returns:
        The length.
    """
    if torch.compiler.is_compiling() or not (length.requires_grad or is_wrapped(length)):
        return length
    key = id(length)
    itself = weakref.ref(length, lambda _: LENGTHS.pop(key, None))
    LENGTHS[key] = Length(itself, _version(length), square, factor, tuple((each, _version(each)) for each in held))
    return length


def _version(tensor: Tensor) -> int:
    # A wrapper of vmap does not count.
    return version_of(below_transforms(tensor))


def of_lengths(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function of remembered lengths where it is an even power, or their multiples or parts; None elsewhere."""
    rule = _RULES.get(func)
    if rule is None or kwargs or not args:
        return None
    lengths = [_found(each) for each in args[:2]]
    return rule(func, args, lengths) if any(lengths) else None


def _found(argument: Any) -> Length | None:
    found = LENGTHS.get(id(argument))
    return found if found is not None and found.holds(argument) else None


def _part(func: Any, args: tuple[Any, ...], lengths: list[Length | None]) -> Any:
    """Some of the lengths, or all in another shape."""
    whole = lengths[0]
    if whole is None:
        return None
    held = tuple(each for each, _ in whole.held)
    return remembered(func(*args), lambda: func(_even_power(whole, 2), *args[1:]), held=held)


def _power(func: Any, args: tuple[Any, ...], lengths: list[Length | None]) -> Any:
    del func
    exponent = args[1] if len(args) == 2 else 2
    if lengths[0] is None or type(exponent) not in (int, float) or exponent < 2 or exponent % 2:
        return None
    return _even_power(lengths[0], int(exponent))


def _even_power(length: Length, exponent: int) -> Tensor:
    square = length.square()
    power = square if exponent == 2 else square ** (exponent // 2)
    return power if length.factor is None else length.factor**exponent * power


def _product(func: Any, args: tuple[Any, ...], lengths: list[Length | None]) -> Any:
    first, second = lengths
    if first is not None and second is not None and first.square is second.square:
        factors = [each.factor for each in (first, second) if each.factor is not None]
        result = first.square()
        for factor in factors:
            result = factor * result
        return result
    place = 0 if first is not None else 1
    return _multiple(func(*args), lengths[place], args[1 - place], divided=False)


def _quotient(func: Any, args: tuple[Any, ...], lengths: list[Length | None]) -> Any:
    return None if lengths[0] is None else _multiple(func(*args), lengths[0], args[1], divided=True)


def _negative(func: Any, args: tuple[Any, ...], lengths: list[Length | None]) -> Any:
    return _multiple(func(*args), lengths[0], -1, divided=False)


def _multiple(result: Any, length: Length | None, factor: Any, *, divided: bool) -> Any:
    """A multiple of a length, remembered as one."""
    if length is None or not isinstance(result, Tensor):
        return result
    held = tuple(each for each, _ in length.held)
    if isinstance(factor, Tensor):
        held = (*held, factor)
    if divided:
        factor = 1 / factor
    factor = factor if length.factor is None else factor * length.factor
    return remembered(result, length.square, factor, held)


# mypy takes Tensor.T for a tensor, while on the class it is a descriptor.
_PARTS = (
    *(Tensor.__getitem__, Tensor.reshape, Tensor.view, Tensor.flatten, Tensor.squeeze, Tensor.unsqueeze, Tensor.select),
    *(Tensor.clone, Tensor.expand, Tensor.transpose, Tensor.diagonal, Tensor.T.__get__, Tensor.mT.__get__),  # type: ignore[attr-defined]
    *(torch.reshape, torch.flatten, torch.squeeze, torch.unsqueeze, torch.select, torch.clone, torch.transpose),
)
_RULES: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(_PARTS, _part),
    **dict.fromkeys((torch.square, Tensor.square, torch.pow, Tensor.pow, Tensor.__pow__), _power),
    **dict.fromkeys(
        (torch.mul, torch.multiply, Tensor.mul, Tensor.multiply, Tensor.__mul__, Tensor.__rmul__), _product
    ),
    **dict.fromkeys((torch.div, torch.divide, Tensor.div, Tensor.divide, Tensor.__truediv__), _quotient),
    **dict.fromkeys((torch.neg, torch.negative, Tensor.neg, Tensor.negative, Tensor.__neg__), _negative),
}
