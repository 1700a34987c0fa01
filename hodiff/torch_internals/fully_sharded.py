"""Modules under `fully_shard` (FSDP2): their state, and the hooks that gather parameters."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

_PACKAGE = "torch.distributed.fsdp"


def is_loaded() -> bool:
    """Whether `torch.distributed.fsdp` is loaded, without which nothing is fully sharded."""
    return _PACKAGE in sys.modules


def is_fully_sharded(module: nn.Module) -> bool:
    """Whether `fully_shard` was applied to a module; `torch.distributed.fsdp` need not be loaded."""
    package = sys.modules.get(_PACKAGE)
    return package is not None and isinstance(module, package.FSDPModule)


def _groups_of(module: Any) -> list[Any]:
    """Return the groups of parameters of a fully sharded module; older versions of torch have at most one."""
    state = module._get_fsdp_state()
    several = getattr(state, "_fsdp_param_groups", None)
    if several is not None:
        return list(several)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def data_mesh_of(module: Any) -> list[Any]:
    """Return the meshes over which a fully sharded module splits its parameters; none if it has no parameters."""
    return [group.mesh_info.mesh for group in _groups_of(module)]


def is_gathered(module: Any) -> bool:
    """Whether the parameters of a fully sharded module are gathered."""
    return any(group.is_unsharded for group in _groups_of(module))


def precision_of(module: Any) -> Any:
    """Return the mixed precision policy of a fully sharded module."""
    return module._get_fsdp_state()._mp_policy


def offloads(module: Any) -> bool:
    """Whether a fully sharded module keeps its parameters on the host."""
    return any(type(group.offload_policy).__name__ == "CPUOffloadPolicy" for group in _groups_of(module))


def is_in_forward(module: Any) -> bool:
    """Whether a fully sharded module is in a forward pass, or was in one that raised."""
    return _is_forward(module._get_fsdp_state())


def any_exist() -> bool:
    """Whether `fully_shard` was applied to any module that still exists."""
    return is_loaded() and bool(_states())


def any_in_forward() -> bool:
    """Whether any fully sharded module is in a forward pass, or was in one that raised."""
    return is_loaded() and any(map(_is_forward, _states()))


def _states() -> list[Any]:
    from torch.distributed._composable_state import _module_state_mapping

    states = [state() for state in list(_module_state_mapping.values())]
    return [state for state in states if hasattr(state, "_training_state")]


def _is_forward(state: Any) -> bool:
    return bool(state._training_state.name == "FORWARD")


def has_hooks(module: nn.Module) -> bool:
    """Whether the hooks of `fully_shard` gather the parameters of a module when it is called."""
    return any(map(_is_of_fully_shard, module._forward_pre_hooks.values()))


@contextmanager
def without_hooks(module: nn.Module) -> Iterator[None]:
    """Remove the hooks of `fully_shard` from a module within the context."""
    tables = (module._forward_pre_hooks, module._forward_hooks)
    held = [dict(table) for table in tables]
    for table in tables:
        for key in [key for key, hook in table.items() if _is_of_fully_shard(hook)]:
            del table[key]
    try:
        yield
    finally:
        for table, hooks in zip(tables, held, strict=True):
            added = {key: hook for key, hook in table.items() if key not in hooks}
            table.clear()
            table.update(hooks | added)


def _is_of_fully_shard(hook: Any) -> bool:
    owner = type(getattr(hook, "__self__", None)).__module__
    return any(each.startswith(_PACKAGE) for each in (owner, getattr(hook, "__module__", "") or ""))
