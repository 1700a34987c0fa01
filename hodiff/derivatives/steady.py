"""Functions that are evaluated several times for one result, and must be the same function each time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hodiff.common.module_state import attributes_put_back, buffers_unwrapped, untouched
from hodiff.common.trees import tensors_in
from hodiff.derivatives.bound_function import BoundFunction
from hodiff.errors import InputError
from hodiff.recompute.reachable import named_modules
from hodiff.rules.autocast import autocast_dtype
from hodiff.torch_internals.autograd.recording import in_fx_trace
from hodiff.torch_internals.autograd.transforms import outside_transforms
from hodiff.torch_internals.autograd.wrapped_tensors import below_transforms


def steady(function: BoundFunction, first: list[Tensor] | None = None) -> BoundFunction:
    """The function, which raises where it returns something else than the first time; the list gets what that was."""
    if torch.compiler.is_compiling() or in_fx_trace():
        return function
    seen = [] if first is None else first
    modules = list(named_modules(function.f))

    def f(*args: Any, **kwargs: Any) -> Any:
        # Buffers move once.
        with untouched(modules) if seen else attributes_put_back(modules):
            result = function.f(*args, **kwargs)
        is_pair = function.has_aux and isinstance(result, tuple)
        with outside_transforms():  # where a detached tensor is wrapped by none
            found = [below_transforms(each).detach() for each in tensors_in(result[0] if is_pair else result)]
        if not seen:
            seen.extend(found)
            return result
        with outside_transforms():
            for one, other in zip(seen, found, strict=False):
                # Tensors of other kinds need not have numbers.
                if type(other) is Tensor and not same(one, other):
                    raise _unsteady(function.caller, one, other)
        return result

    return replace(function, f=f)


@contextmanager
def leaving_no_trace(f: Callable[..., Any]) -> Iterator[None]:
    """Where a transform evaluates a function, whose modules are not to keep the transform's tensors."""
    modules = list(named_modules(f))
    with attributes_put_back(modules), buffers_unwrapped(modules):
        yield


def same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same number up to the rounding of sums in another order."""
    if one.shape != other.shape or not one.is_floating_point():
        return one.shape == other.shape
    # Sums of many threads may round differently from run to run.
    tolerance = max(100 * torch.finfo(one.dtype).eps, _lowered_eps(one.device.type))
    return torch.allclose(one, other, rtol=tolerance, atol=tolerance, equal_nan=True)


def _lowered_eps(device: str) -> float:
    """A unit of rounding of what `torch.autocast` lowers to, by which kernels and the rules for them may differ."""
    dtype = autocast_dtype(device)
    return 0.0 if dtype is None else torch.finfo(dtype).eps


def difference(one: Tensor, other: Tensor) -> str:
    """How two tensors of one shape differ, in words."""
    if one.numel() == 1:
        return f"{one.item():.6g} and {other.item():.6g}, {abs(one.item() - other.item()):.1e} apart"
    return f"outputs that differ by up to {(one - other).abs().max().item():.2g}"


def _unsteady(caller: str, one: Tensor, other: Tensor) -> InputError:
    return InputError(
        f"{caller}: f: expected the same value each time, as it is evaluated anew for each group of directions or each "
        f"product, got {difference(one, other)}; look for random numbers (model.eval(), randomness='same', a seed that "
        "f sets itself) and for state that changes in between, or take the route 'reverse-over-reverse' (for a "
        "Jacobian, the mode 'reverse'), which evaluates f once."
    )
