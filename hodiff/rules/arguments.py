"""Argument checks of the public functions, with uniform messages."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hodiff.common.options import is_int, is_number, require_number
from hodiff.common.trees import describe, has_strides
from hodiff.errors import InputError


def require_floating(function: str, **arguments: Any) -> None:
    """Raise if an argument is not a real floating-point tensor."""
    for name, value in arguments.items():
        if not isinstance(value, Tensor):
            raise InputError(
                f"{function}: {name}: expected a floating-point tensor, got {type(value).__name__}; "
                "torch.as_tensor converts it."
            )
        if not value.is_floating_point():
            raise InputError(
                f"{function}: {name}: expected a floating-point tensor, got {dtype_name(value)}; "
                f"{name}.to(torch.get_default_dtype()) converts it."
            )


# Dtypes that torch's operators compute in; 8-bit and 4-bit floating point is for storage.
_COMPUTED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def require_dense_floating(function: str, **arguments: Any) -> None:
    """Raise if an argument is not a dense floating-point tensor of 16 bits or more."""
    for name, value in arguments.items():
        if type(value) is Tensor and value.layout is torch.strided and not value.is_nested and value.dtype in _COMPUTED:
            continue
        require_floating(function, **{name: value})
        require_dense(function, **{name: value})
        if value.dtype not in _COMPUTED:
            raise InputError(
                f"{function}: {name}: expected a floating-point tensor of 16 bits or more, got {dtype_name(value)}; "
                f"{name}.to(torch.float32) converts it."
            )


def require_dense(function: str, **arguments: Tensor) -> None:
    """Raise if a tensor is not dense."""
    for name, value in arguments.items():
        if not has_strides(value):
            raise InputError(
                f"{function}: {name}: expected a dense tensor, got {describe(value)}; {name}.to_dense() converts it."
            )


def require_one_device(function: str, **arguments: Any) -> None:
    """Raise if tensors are on several devices; other arguments are ignored."""
    first: torch.device | None = None
    for value in arguments.values():
        if isinstance(value, Tensor):
            first = first or value.device
            if value.device != first:
                given = {name: each.device for name, each in arguments.items() if isinstance(each, Tensor)}
                listing = ", ".join(f"{name} on {device}" for name, device in given.items())
                raise InputError(f"{function}: expected tensors of one device, got {listing}; Tensor.to moves them.")


def require_one_dtype(function: str, **arguments: Tensor | None) -> None:
    """Raise if tensors have several dtypes; None is ignored."""
    dtypes = {name: dtype_name(each) for name, each in arguments.items() if each is not None}
    if len(set(dtypes.values())) > 1:
        listing = ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items())
        raise InputError(f"{function}: expected one dtype, got {listing}; .to(dtype) converts.")


def require_number_or_floating(function: str, **arguments: Any) -> None:
    """Raise if an argument is neither a real number nor a real floating-point tensor."""
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            require_floating(function, **{name: value})
        elif not is_number(value):
            raise InputError(
                f"{function}: {name}: expected a number or a floating-point tensor, got {type(value).__name__}."
            )


def require_positive_or_floating(function: str, name: str, value: Any, *, zero: bool = False) -> None:
    """Raise if an argument is neither a positive (or nonnegative) number nor a real floating-point tensor."""
    require_number_or_floating(function, **{name: value})
    if not isinstance(value, Tensor):
        require_number(function, name, value, positive=not zero, nonnegative=zero)


def require_broadcastable(function: str, **arguments: Any) -> None:
    """Raise if the shapes of tensors do not broadcast; other arguments are ignored."""
    shapes = {name: tuple(value.shape) for name, value in arguments.items() if isinstance(value, Tensor)}
    if shapes and not broadcast(*shapes.values()):
        listing = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise InputError(
            f"{function}: expected shapes that broadcast, got {listing}; sizes aligned at the last dimension must be "
            "equal or 1."
        )


def require_broadcasts_to(function: str, name: str, value: Any, shape: Sequence[int], *, remedy: str = "") -> None:
    """Raise if a tensor does not broadcast to a shape; other arguments are ignored."""
    if isinstance(value, Tensor) and not broadcasts_to(value.shape, shape):
        ending = f"; {remedy}." if remedy else "."
        raise InputError(
            f"{function}: {name}: expected a shape that broadcasts to {tuple(shape)}, got {tuple(value.shape)}{ending}"
        )


def broadcast(*shapes: Sequence[int]) -> bool:
    """Whether shapes broadcast with each other."""
    differ = _comparison()
    if differ is operator.ne and shapes.count(shapes[0]) == len(shapes):  # quick
        return True
    rank = max(map(len, shapes))
    found = [1] * rank
    for shape in shapes:
        for k, size in enumerate(shape, start=rank - len(shape)):
            if differ(size, 1):
                if differ(found[k], 1) and differ(found[k], size):
                    return False
                found[k] = size
    return True


def broadcasts_to(shape: Sequence[int], to: Sequence[int]) -> bool:
    """Whether a shape broadcasts to another one."""
    missing, differ = len(to) - len(shape), _comparison()
    return missing >= 0 and not any(
        differ(size, 1) and differ(size, wanted) for size, wanted in zip(shape, to[missing:], strict=True)
    )


def _comparison() -> Callable[[Any, Any], bool]:
    """Return a predicate for unequal sizes; symbols whose comparison is undecided count as equal."""
    if not torch.compiler.is_compiling():
        return operator.ne
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # slow to import

    return lambda a, b: guard_or_false(a != b)


def require_dims(function: str, x: Tensor, dim: Any) -> tuple[int, ...]:
    """Return dimensions as sorted non-negative ints; raise if any is not an int, out of range or repeated."""
    given = tuple(dim) if hasattr(dim, "__iter__") else (dim,)
    rank = max(x.dim(), 1)
    for each in given:
        if not is_int(each) or not -rank <= each < rank:
            raise InputError(f"{function}: dim: expected ints from {-rank} to {rank - 1}, got {dim!r}.")
    normal = tuple(sorted(each % rank for each in given))
    if len(set(normal)) < len(normal):
        raise InputError(f"{function}: dim: expected each dimension once, got {dim!r} for {x.dim()} dimensions.")
    return normal


def dtype_name(value: Tensor) -> str:
    """Return the name of a tensor's dtype, without torch's."""
    return str(value.dtype).removeprefix("torch.")
