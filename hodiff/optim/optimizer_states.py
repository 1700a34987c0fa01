"""Checks that a state is undamaged, and belongs to the optimizer and to parameters of its dtype.

States in higher precision than their parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from hodiff.common.options import is_number
from hodiff.common.trees import describe
from hodiff.distributed.layouts import local_part
from hodiff.errors import InputError
from hodiff.optim.settings import CHECKS
from hodiff.torch_internals.process_groups import is_sharded


def precise(tensor: Tensor) -> Tensor:
    """Convert a tensor to at least 32 bits."""
    return tensor.float() if tensor.dtype.itemsize < 4 else tensor


def numbered(states: Mapping[Any, Any]) -> dict[Any, Any]:
    """Join states under the number of their parameter with those under the same number as text."""
    # `torch.distributed.checkpoint` loads tensors in place, but other values under keys that it converts to text.
    joined: dict[Any, Any] = {}
    for key, state in states.items():
        number = int(key) if isinstance(key, str) and key.isdecimal() else key
        joined[number] = {**joined[number], **state} if number in joined else state
    return joined


def restore(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Load states of 16-bit parameters again in at least 32 bits, as torch rounds them to the parameters' dtype."""
    numbers = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
    parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for number, parameter in zip(numbers, parameters, strict=True):
        if parameter.dtype.itemsize < 4 and number in state_dict["state"]:
            move = partial(_moved, parameter)
            optimizer.state[parameter] = pytree.tree_map_only(Tensor, move, state_dict["state"][number])


def _moved(parameter: Tensor, tensor: Tensor) -> Tensor:
    dtype = precise(parameter).dtype if tensor.is_floating_point() else tensor.dtype
    return tensor.to(parameter.device, dtype, copy=True)


# Numbers for which torch's optimizers choose a separate dtype.
_SCALARS = {"step", "t"}


def require_own_state(
    caller: str,
    loaded: Mapping[str, Any],
    defaults: Mapping[str, Any],
    whole: Collection[str],
    others: Collection[str],
) -> None:
    """Raise on groups and states of another optimizer, and fill in settings, off by default, that older states lack."""
    expected = f"{caller}: load_state_dict: expected what the state_dict of this optimizer returns, got"
    remedy = "load it into an optimizer of the kind that it comes from, or begin without it."
    for group in loaded["param_groups"]:
        missing = [name for name, value in defaults.items() if name not in group and not _is_off(value)]
        if missing:
            raise InputError(f"{expected} one whose groups have no {_listed(missing)}; {remedy}")
        foreign = [name for name in group if name in CHECKS and name not in defaults]
        if foreign:
            raise InputError(f"{expected} one whose groups have {_listed(foreign)}; {remedy}")
        for name in group.keys() & defaults.keys() & CHECKS.keys():
            CHECKS[name](caller, f"load_state_dict: {name}", group[name])
    for key, state in loaded["state"].items():
        if not isinstance(key, Tensor):
            raise InputError(f"{expected} one with {key!r}, which is not the number of a parameter; remove it.")
        if not isinstance(state, dict):
            raise InputError(
                f"{expected} {describe(state)} for a parameter {tuple(key.shape)} instead of a dict; {_OTHERWISE}."
            )
        if foreign := sorted(state.keys() & others):
            raise InputError(f"{expected} one with {_listed(foreign)} for a parameter; {remedy}")
        missing = [name for name in whole if name not in state]
        if 0 < len(missing) < len(whole):
            raise InputError(
                f"{expected} one with {_listed(sorted(state))} for a parameter and no "
                f"{_listed(sorted(missing))}; {remedy}"
            )
    for group in loaded["param_groups"]:
        for name in defaults.keys() - group.keys():
            group[name] = defaults[name]


# Entries of states and groups that count, or number steps.
_COUNTERS = {"step", "taken", "refreshes", "refresh_at", "averages", "n_iter", "func_evals", "on_rank"}

_OTHERWISE = "load an earlier state, or begin without it"


def require_undamaged(caller: str, loaded: Mapping[str, Any], *, on_meta: bool) -> None:
    """Raise on NaN, infinity, negative counters, and tensors without data, unless parameters have none either."""
    # torch would round numbers out of the range of 16-bit parameters to infinity.
    states = [state for state in loaded["state"].values() if isinstance(state, dict)]
    for entries in [*states, *loaded["param_groups"]]:
        for name in entries.keys() & _COUNTERS:
            if not _is_count(entries[name]):
                raise InputError(
                    f"{caller}: load_state_dict: expected a finite number of at least 0, got {name!r} that is "
                    f"{_shown(entries[name])}; {_OTHERWISE}."
                )
    # Entries of groups may be limits, and infinite.
    for name, entry in chain.from_iterable(state.items() for state in states):
        for part in pytree.tree_leaves(entry):
            if isinstance(part, Tensor) and part.is_meta and not on_meta:
                raise InputError(
                    f"{caller}: load_state_dict: expected tensors with data, got {name!r} on the meta device; load the "
                    "file without map_location='meta' and outside of torch.device('meta')."
                )
            if not _is_finite(part):
                raise InputError(
                    f"{caller}: load_state_dict: expected finite numbers, got {name!r} with inf or NaN for a "
                    f"parameter; {_OTHERWISE}."
                )


def _is_count(value: Any) -> bool:
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        return value.is_meta or bool(value.isfinite() & (value >= 0))
    return is_number(value) and math.isfinite(value) and value >= 0


def _shown(value: Any) -> str:
    value = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    return repr(value) if is_number(value) or isinstance(value, (str, type(None))) else describe(value)


def _is_finite(value: Any) -> bool:
    if not isinstance(value, Tensor):
        return not isinstance(value, float) or math.isfinite(value)
    part = local_part(value)
    # Quantized states of other libraries are tensors of other types, which may not support the operator.
    if type(part) not in {Tensor, nn.Parameter} or part.is_meta or part.dtype.itemsize < 2:
        return True
    return bool(part.isfinite().all())


def require_generator_state(caller: str, generator: torch.Generator, state: Any) -> None:
    """Raise on a state that a generator of the same kind does not take."""
    try:
        torch.Generator(generator.device).set_state(state.cpu())
    except (AttributeError, RuntimeError, TypeError) as error:
        raise InputError(
            f"{caller}: load_state_dict: generator: expected the state of a generator on {generator.device}, got "
            f"{describe(state)}, which torch does not take: {error}; leave 'generator' out to draw anew."
        ) from error


# By name the shape of a tensor, or a list of shapes for a list, with None for entries that are None. The shape () is
# that of one number, as a tensor or not.
Shapes = Mapping[str, Sequence[Any]]

# torch.optim.SGD stores None without momentum.
_OPTIONAL = {"momentum_buffer"}


def require_shapes(
    caller: str, loaded: Mapping[str, Any], expected: Callable[[Tensor, Mapping[str, Any], Mapping[str, Any]], Shapes]
) -> None:
    """Raise on states of parameters of other shapes; `expected` returns them for a parameter, its group and state."""
    for group in loaded["param_groups"]:
        for parameter in group["params"]:
            state = loaded["state"].get(parameter)
            if not state or is_sharded(parameter):
                continue
            for name, shape in expected(parameter, group, state).items():
                if name not in state or (state[name] is None and name in _OPTIONAL):
                    continue
                if not _has_shape(state[name], shape):
                    needed = shape if isinstance(shape, list) else tuple(shape)
                    raise InputError(
                        f"{caller}: load_state_dict: expected a state of parameters of the same shapes, got {name!r} "
                        f"of shape {_shape_of(state[name])} for a parameter {tuple(parameter.shape)}, which needs "
                        f"{needed}; load it into an optimizer of the model that it comes from, with the parameters in "
                        "the same order."
                    )


def _has_shape(entry: Any, shape: Sequence[Any] | None) -> bool:
    if isinstance(shape, list):
        return isinstance(entry, (list, tuple)) and len(entry) == len(shape) and all(map(_has_shape, entry, shape))
    if shape is None:
        return entry is None
    if not isinstance(entry, Tensor):
        return not shape and is_number(entry)
    return entry.shape == tuple(shape) or (not shape and entry.numel() == 1)


def _shape_of(entry: Any) -> Any:
    if isinstance(entry, (list, tuple)):
        return list(map(_shape_of, entry))
    return tuple(entry.shape) if isinstance(entry, Tensor) else entry


def require_dtypes(
    caller: str, states: Mapping[Tensor, Mapping[str, Any]], dtype_of: Callable[[Tensor], torch.dtype]
) -> None:
    """Raise on states of parameters whose dtype has changed."""
    for parameter, state in states.items():
        wanted = dtype_of(parameter).to_real()
        for tensor in _tensors(state):
            # A state of complex parameters may contain real numbers.
            if (tensor.is_floating_point() or tensor.is_complex()) and tensor.dtype.to_real() != wanted:
                raise InputError(
                    f"{caller}: step: expected parameters of the dtype of the state, {tensor.dtype}, got one that is "
                    f"now {parameter.dtype}; call optimizer.load_state_dict(optimizer.state_dict()) after the change, "
                    "which converts the state, and compute the gradients again."
                )


def _tensors(state: Mapping[str, Any]) -> Iterator[Tensor]:
    for name, value in state.items():
        parts = value if isinstance(value, (list, tuple)) else (value,)
        yield from (each for each in parts if isinstance(each, Tensor) and name not in _SCALARS)


def _is_off(value: Any) -> bool:
    return value is None or value is False


def _listed(names: Collection[str]) -> str:
    return ", ".join(map(repr, names))
