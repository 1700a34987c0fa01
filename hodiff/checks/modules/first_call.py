"""The first call of a module to be checked: of a copy, in the precision that it runs in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from hodiff.checks.attempts import Failure, attempt, first_line
from hodiff.checks.subjects.double_precision import InDouble, is_low
from hodiff.checks.subjects.module_calls import CallFailed, ModuleCall, same, stale_call, unsteady_call
from hodiff.checks.subjects.setting import deep_copy
from hodiff.errors import InputError
from hodiff.torch_internals.modules import attributes_of


@dataclass(frozen=True)
class Called:
    """The first call, of a copy of the module.

    Attributes:
        root: The call.
        args: What it was called with, in the precision that it runs in.
        unsteady: The submodule that gave something else in a second call; None if all gave the same.
        reason: Why.
        stale: The submodule that keeps what it computed of its parameters or inputs; None if all follow them.
    """

    root: ModuleCall
    args: tuple[Any, ...]
    unsteady: ModuleCall | None
    reason: str
    stale: ModuleCall | None = None


def first_call(module: nn.Module, inputs: tuple[Any, ...]) -> Called:
    """Call a module in float64 throughout; else in float64 where it does not choose; else as it is."""
    failed: list[CallFailed] = []
    for in_double, throughout in ((True, True), (True, False), (False, False)):
        own, fresh = (_copy_of(module, in_double=in_double) for _ in range(2))
        args = tree_map_only(Tensor, _in_double if in_double else _detached, inputs)
        try:
            precision = InDouble() if throughout else None
            root, unsteady, reason = unsteady_call(own, args, precision)
            _put_back(own, fresh)
            stale: Any = None
            # Of a module that counts its calls, say, the note is enough.
            if unsteady is None:
                # Where it may not be called at other numbers, nothing is known.
                stale = _with_results(module, root) or attempt(stale_call, own, fresh, args, precision)
            return Called(root, args, unsteady, reason, None if isinstance(stale, Failure) else stale)
        except CallFailed as failure:
            failed.append(failure)
    first = failed[0]
    raise InputError(
        f"check: f: expected {type(module).__name__}(*inputs) to run, but {first.call.label} raised "
        f"{first_line(first.error)}. Check the inputs; tensors that it makes must have the dtype of its inputs."
    ) from first.error


def _put_back(called: nn.Module, fresh: nn.Module) -> None:
    """Undo what a call wrote into its parameters, as embeddings with max_norm do: it is what a check has to find."""
    given = dict(fresh.named_parameters())
    with torch.no_grad():
        for name, each in called.named_parameters():
            if name in given and not same(each, given[name]):
                each.copy_(given[name])


def _with_results(module: nn.Module, root: ModuleCall) -> ModuleCall | None:
    """The call of a submodule that holds a tensor with a graph, which an earlier call has computed."""
    names = {
        name
        for name, part in module.named_modules()
        if any(isinstance(each, Tensor) and each.grad_fn is not None for each in tree_leaves(attributes_of(part)))
    }
    return next((call for call in root.post_order() if call.name in names), None)


def _copy_of(module: nn.Module, *, in_double: bool) -> nn.Module:
    try:
        copy = deep_copy(module)
    except Exception as error:
        raise InputError(
            f"check: f: expected a module that can be copied, but copy.deepcopy raised "
            f"{first_line(error)}. Call lazy modules once before, and take what cannot be copied from its attributes."
        ) from error
    if in_double:
        _make_double(copy)
    return copy


def _detached(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def _in_double(tensor: Tensor) -> Tensor:
    """A copy in float64 or complex128; integers stay."""
    tensor = _detached(tensor)
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor


def _make_double(module: nn.Module) -> None:
    # What hangs on real parameters, such as those that an RNN keeps in one piece, is torch's to bring along.
    module.double()
    for each in (*module.parameters(), *module.buffers()):
        if each.is_complex():
            each.data = _in_double(each)
    # Tensors that are neither, alone or in collections.
    for part in module.modules():
        for name, value in list(vars(part).items()):
            if name.startswith("_") and isinstance(value, dict):
                continue  # where modules keep what they register
            if isinstance(value, (Tensor, list, tuple, dict)):
                vars(part)[name] = tree_map_only(Tensor, _plain_in_double, value)


def _plain_in_double(tensor: Tensor) -> Tensor:
    """A tensor that a module holds; one that knows its memory, such as a parameter in a list, stays what it is."""
    if not is_low(tensor) or isinstance(tensor, nn.Parameter):
        return tensor
    return _in_double(tensor).requires_grad_(tensor.requires_grad)
