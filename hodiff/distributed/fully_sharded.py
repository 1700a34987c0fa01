"""Modules under `fully_shard`, run as functions of the shards of their parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils import _pytree as pytree

from hodiff.distributed.layouts import Layout, is_distributed
from hodiff.distributed.stand_ins import ShardedParameter
from hodiff.errors import InputError
from hodiff.torch_internals.autograd.transforms import in_transform, outside_transforms
from hodiff.torch_internals.fully_sharded import (
    any_exist,
    any_in_forward,
    data_mesh_of,
    has_hooks,
    is_fully_sharded,
    is_gathered,
    is_in_forward,
    offloads,
    precision_of,
    without_hooks,
)
from hodiff.torch_internals.modules import parameters_by_name
from hodiff.torch_internals.threads import one_thread_at_a_time

# Whether fully sharded modules run as functions of their shards.
_running: ContextVar[bool] = ContextVar("running", default=False)


def sharded_modules_run() -> bool:
    """Whether fully sharded modules run as functions of their shards."""
    return _running.get()


def require_no_training(name: str, modules: Callable[[], Iterable[nn.Module]]) -> None:
    """Raise if a checkpoint would belong to ordinary training of a fully sharded module, outside of a product."""
    # Hooks gather parameters for torch's own checkpoint only: another second run would leave gradients at None.
    if sharded_modules_run() or not any_exist():
        return
    if any_in_forward() or any(map(is_fully_sharded, modules())):
        raise InputError(
            f"{name}: expected modules without fully_shard outside of hodiff's derivatives, got a part of a module "
            "under fully_shard, or a forward pass of one that raised before; in training, call "
            "torch.utils.checkpoint outside of hodiff.corrected()."
        )


@contextmanager
def running_again(name: str) -> Iterator[None]:
    """Run a checkpointed part again, with stand-ins and hooks in the modules that it reaches.

    Args:
        name: The checkpointing function, for error messages.
    """

    def require_reached(module: nn.Module, _: Any) -> None:
        if is_fully_sharded(module) and has_hooks(module):
            raise InputError(
                f"{name}: f: expected every fully sharded module to be an argument of f or closed over by f, got a "
                f"call of {type(module).__name__}, which f reaches otherwise; pass it as an argument."
            )

    token, hook = _running.set(True), register_module_forward_pre_hook(require_reached)
    try:
        yield
    finally:
        hook.remove()
        _running.reset(token)


class FullyShardedModules:
    """Modules under `fully_shard` that a function calls.

    Args:
        caller: The public function, for error messages.
        modules: All modules that the function reaches.

    Attributes:
        mesh: The mesh over which parameters are sharded and data are split.
    """

    def __init__(self, caller: str, modules: Sequence[nn.Module]):
        self._caller = caller
        self._units = list(dict.fromkeys(part for each in modules for part in each.modules() if is_fully_sharded(part)))
        meshes = [mesh for unit in self._units for mesh in data_mesh_of(unit)]
        if len(set(meshes)) > 1:
            raise InputError(
                f"{caller}: f: expected modules that fully_shard splits over one device mesh, got {len(set(meshes))}; "
                "call fully_shard with the same mesh for all modules."
            )
        if any(map(offloads, self._units)):
            raise InputError(
                f"{caller}: f: expected fully sharded parameters on the device of the mesh, got a CPUOffloadPolicy; "
                "call fully_shard without offload_policy."
            )
        self.mesh = meshes[0] if meshes else None
        self._slots = {unit: _slots_of(unit) for unit in self._units}
        self._all_slots = (
            list(
                {
                    (id(own), name): (own, name)
                    for each in modules
                    for part in each.modules()
                    for own in (parameters_by_name(part),)
                    for name in own
                }.values()
            )
            if self._units
            else []
        )

    @property
    def names(self) -> str:
        """The types of the modules."""
        return ", ".join(sorted({type(each).__name__ for each in self._units}))

    def shard(self, leaves: Sequence[Any]) -> None:
        """Shard modules that a forward pass has left gathered; raise if a leaf is a gathered parameter."""
        if any(map(is_in_forward, self._units)):
            raise InputError(
                f"{self._caller}: f: expected modules under fully_shard between their calls, got one in a forward "
                "pass, or one whose last forward pass raised, so that its parameters are not those of the shards; let "
                "a forward pass end without an error first."
            )
        gathered: list[Any] = [unit for unit in self._units if is_gathered(unit)]
        if gathered and any(isinstance(each, nn.Parameter) and not is_distributed(each) for each in leaves):
            raise InputError(
                f"{self._caller}: x: expected the parameters of sharded modules, got parameters that a forward pass "
                "left gathered; call reshard() of the modules under fully_shard, then take named_parameters()."
            )
        for unit in gathered:
            unit.reshard()

    def __bool__(self) -> bool:
        return bool(self._units)

    @contextmanager
    def running(self, given: Mapping[int, Tensor], layout_for: Callable[[Any], Layout]) -> Iterator[None]:
        """Run within the context as functions of stand-ins.

        Args:
            given: Stand-ins by the id of the parameter for which they stand.
            layout_for: Returns the layout of a parameter without a stand-in, which is a constant.
        """
        with ExitStack() as stack:
            stack.enter_context(one_thread_at_a_time())
            stack.callback(_running.reset, _running.set(True))
            stack.enter_context(refusing_others(self._caller, self._units))
            stack.enter_context(_exchanged(self._all_slots, lambda each: _stand_in(each, given, layout_for)))
            for unit in self._units:
                stack.enter_context(without_hooks(unit))
            for unit in self._units:
                stack.enter_context(Gathering(unit, self._slots[unit]).hooked())
            yield


class Gathering:
    """Hooks of a fully sharded module that gather its parameters for the duration of each call.

    Args:
        unit: The module.
        slots: The places of its parameters.
    """

    def __init__(self, unit: nn.Module, slots: Sequence[tuple[Any, str]]):
        self._unit, self._slots, self._precision = unit, slots, precision_of(unit)
        self._calls: list[ExitStack] = []

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Register the hooks within the context."""
        before = self._unit.register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True)
        after = self._unit.register_forward_hook(self._leave, always_call=True)
        try:
            yield
        finally:
            before.remove()
            after.remove()
            while self._calls:
                self._calls.pop().close()

    def _enter(self, _: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        memory: dict[int, Tensor] = {}

        def whole(each: Any) -> Any:
            if type(each) is not ShardedParameter:
                return each
            if id(each) not in memory:
                memory[id(each)] = each.full_tensor_in(self._precision.param_dtype)
            return memory[id(each)]

        self._calls.append(ExitStack())
        self._calls[-1].enter_context(_exchanged(self._slots, whole))
        if self._precision.cast_forward_inputs:
            args, kwargs = _cast((args, kwargs), self._precision.param_dtype)
        return args, kwargs

    def _leave(self, _: nn.Module, args: Any, output: Any) -> Any:
        if self._calls:
            self._calls.pop().close()
        return _cast(output, self._precision.output_dtype)


@contextmanager
def refusing_others(caller: str, units: Sequence[nn.Module] = ()) -> Iterator[None]:
    """Raise within the context if a fully sharded module is called that is not one of some units."""
    known = set(map(id, units))

    def require_known(module: nn.Module, _: Any) -> None:
        if is_fully_sharded(module) and id(module) not in known:
            raise InputError(
                f"{caller}: f: expected every fully sharded module to be an argument of f or closed over by f, got a "
                f"call of {type(module).__name__}, which f reaches otherwise; pass it as an argument."
            )

    hook = register_module_forward_pre_hook(require_known)
    try:
        yield
    finally:
        hook.remove()


def require_no_fully_sharded(caller: str, modules: Iterable[nn.Module]) -> None:
    """Raise if a module is under `fully_shard`."""
    for module in modules:
        for each in module.modules():
            if is_fully_sharded(each):
                raise InputError(
                    f"{caller}: f: expected modules that are not under fully_shard, got {type(each).__name__}, whose "
                    f"ranks would have to take the same steps; use the model before fully_shard is applied."
                )


def _cast(tree: Any, dtype: torch.dtype | None) -> Any:
    if dtype is None:
        return tree

    def cast(each: Tensor) -> Tensor:
        return each.to(dtype) if each.is_floating_point() else each

    return pytree.tree_map_only(Tensor, cast, tree)


def _slots_of(unit: nn.Module) -> list[tuple[Any, str]]:
    """Return the places of all parameters of a unit, except those of units inside of it."""
    slots: list[tuple[Any, str]] = []
    stack = [unit]
    while stack:
        module = stack.pop()
        own = parameters_by_name(module)
        slots += [(own, name) for name, each in own.items() if each is not None]
        stack += [each for each in module.children() if not is_fully_sharded(each)]
    return slots


@contextmanager
def _exchanged(slots: Sequence[tuple[Any, str]], exchange: Callable[[Any], Any]) -> Iterator[None]:
    held = [own[name] for own, name in slots]
    try:
        for (own, name), each in zip(slots, held, strict=True):
            own[name] = exchange(each)
        yield
    finally:
        for (own, name), each in zip(slots, held, strict=True):
            own[name] = each


def _stand_in(parameter: Any, given: Mapping[int, Tensor], layout_for: Callable[[Any], Layout]) -> Any:
    if id(parameter) in given:
        return given[id(parameter)]
    if not is_distributed(parameter):
        return parameter
    # A transform would return a tensor without shards.
    with outside_transforms() if in_transform() else nullcontext():
        shard = parameter.detach().to_local()
    return ShardedParameter(shard, layout_for(parameter))
