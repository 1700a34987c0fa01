"""First call of a copy of the checked module, in float64 if it runs there."""

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
        args: Its arguments, in the precision that the module runs in.
        unsteady: The submodule whose second call gave another output; None if all outputs were equal.
        reason: Why the outputs differ.
        stale: The submodule that caches results of its parameters or inputs; None if there is none.
    """

    root: ModuleCall
    args: tuple[Any, ...]
    unsteady: ModuleCall | None
    reason: str
    stale: ModuleCall | None = None


def first_call(module: nn.Module, inputs: tuple[Any, ...]) -> Called:
    """Call a copy with all precisions read as float64; else with float64 parameters and inputs; else as it is."""
    failed: list[CallFailed] = []
    for in_double, throughout in ((True, True), (True, False), (False, False)):
        own, fresh = (_copy_of(module, in_double=in_double) for _ in range(2))
        args = tree_map_only(Tensor, _in_double if in_double else _detached, inputs)
        try:
            precision = InDouble() if throughout else None
            root, unsteady, reason = unsteady_call(own, args, precision)
            _put_back(own, fresh)
            stale: Any = None
            # A note suffices for modules whose calls differ, such as modules that count their calls.
            if unsteady is None:
                # A module that cannot be called with other numbers may still be right.
                stale = _with_results(module, root) or attempt(stale_call, own, fresh, args, precision)
            return Called(root, args, unsteady, reason, None if isinstance(stale, Failure) else stale)
        except CallFailed as failure:
            failed.append(failure)
    first = failed[0]
    raise InputError(
        f"check: f: expected {type(module).__name__}(*inputs) to run, but {first.call.label} raised "
        f"{first_line(first.error)}. Check the inputs; tensors that the module creates must have the dtype of its "
        "inputs."
    ) from first.error


def _put_back(called: nn.Module, fresh: nn.Module) -> None:
    """Restore the parameters that a call overwrote, as embeddings with max_norm do, so that the check sees it."""
    given = dict(fresh.named_parameters())
    with torch.no_grad():
        for name, each in called.named_parameters():
            if name in given and not same(each, given[name]):
                each.copy_(given[name])


def _with_results(module: nn.Module, root: ModuleCall) -> ModuleCall | None:
    """Return the call of a submodule that holds a tensor with a graph, computed by an earlier call."""
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
            f"{first_line(error)}. Call lazy modules once before, and remove attributes that cannot be copied."
        ) from error
    if in_double:
        _make_double(copy)
    return copy


def _detached(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def _in_double(tensor: Tensor) -> Tensor:
    """Return a copy in float64 or complex128; integers keep their dtype."""
    tensor = _detached(tensor)
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor


def _make_double(module: nn.Module) -> None:
    # `Module.double` also updates what depends on real parameters, such as the flat weights of an RNN.
    module.double()
    for each in (*module.parameters(), *module.buffers()):
        if each.is_complex():
            each.data = _in_double(each)
    # Attributes may hold further tensors, alone or in collections.
    for part in module.modules():
        for name, value in list(vars(part).items()):
            if name.startswith("_") and isinstance(value, dict):
                continue  # where modules keep what they register
            if isinstance(value, (Tensor, list, tuple, dict)):
                vars(part)[name] = tree_map_only(Tensor, _plain_in_double, value)


def _plain_in_double(tensor: Tensor) -> Tensor:
    """Return a tensor attribute of lower precision in float64; parameters are unchanged."""
    if not is_low(tensor) or isinstance(tensor, nn.Parameter):
        return tensor
    return _in_double(tensor).requires_grad_(tensor.requires_grad)
