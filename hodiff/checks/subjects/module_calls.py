"""Recorded calls of a module's submodules, with copies of their arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from hodiff.checks.subjects.double_precision import InDouble
from hodiff.checks.subjects.setting import Setting
from hodiff.common.complex_numbers import equal_with_nan
from hodiff.common.module_state import attributes_put_back, functional_call, untouched_buffers
from hodiff.common.trees import has_strides, tensors_in
from hodiff.torch_internals.autograd.transforms import in_transform

# Relative change of parameters and inputs that outputs must follow, and tolerance for equal outputs.
_MOVE = 1e-2
_STALE = 1e-6


@dataclass(eq=False)
class ModuleCall:
    """Recorded call of a module.

    Attributes:
        name: Its qualified name; empty for the root.
        module: The module.
        args: Copies of its positional arguments.
        kwargs: Copies of its keyword arguments.
        setting: The setting in which it is called.
        output: A copy of its output; None if it raised.
        children: The calls that it made, in order.
    """

    name: str
    module: nn.Module
    args: Any
    kwargs: Any
    setting: Setting = field(default_factory=Setting)
    output: Any = None
    children: list[ModuleCall] = field(default_factory=list)

    @property
    def label(self) -> str:
        """Qualified name and class, such as `layers.3.norm (LayerNorm)`."""
        kind = type(self.module).__name__
        return f"{self.name} ({kind})" if self.name else kind

    @property
    def location(self) -> str:
        """Source line of the module's forward, such as `file.py:123`; empty if it is unknown."""
        try:
            file, (_, line) = (
                inspect.getsourcefile(type(self.module)),
                inspect.getsourcelines(type(self.module).forward),
            )
        except (OSError, TypeError):
            return ""
        return f"{Path(file).name}:{line}" if file else ""

    @cached_property
    def signature(self) -> tuple[str, ...]:
        """Class, options and shapes, which equal modules share."""
        tensors = (*self.module.parameters(), *tensors_in((self.args, self.kwargs)))
        shapes = [f"{each.dtype}{tuple(each.shape)}" for each in tensors]
        return (f"{type(self.module).__module__}.{type(self.module).__qualname__}", repr(self.module), *shapes)

    def run(self, args: Any, kwargs: Any, parameters: Mapping[str, Tensor]) -> Any:
        """Call the module in its setting with these arguments and parameters, and with copies of its buffers."""
        # A call may write into its buffers, which the next call must not see.
        buffers = {name: each.detach().clone() for name, each in self.module.named_buffers()}
        with self.setting.entered():
            return functional_call(self.module, {**buffers, **parameters}, args, kwargs)

    def again(self) -> Callable[[], Any]:
        """Return a function that repeats the call, with copies of its arguments."""
        args, kwargs = self.setting.copied((self.args, self.kwargs))
        return lambda: self.run(args, kwargs, {})

    def leaves(self) -> Iterator[ModuleCall]:
        """Yield the calls within this call that call no other module."""
        for child in self.children:
            yield from child.leaves()
        if not self.children:
            yield self

    def post_order(self) -> Iterator[ModuleCall]:
        """Yield all calls in the order in which they returned."""
        for child in self.children:
            yield from child.post_order()
        yield self


class CallFailed(Exception):  # noqa: N818 (what failed is the user's code)
    """Error of a module that raised.

    Attributes:
        call: The innermost call that raised.
        error: The exception.
    """

    def __init__(self, call: ModuleCall, error: Exception):
        super().__init__(str(error))
        self.call = call
        self.error = error


def record_calls(module: nn.Module, args: tuple[Any, ...], precision: InDouble | None = None) -> ModuleCall:
    """Call a module once with copies of the arguments, and record the calls of its submodules."""
    stack: list[ModuleCall] = []
    roots: list[ModuleCall] = []
    setting = Setting.of(module, precision)
    copied = setting.copied

    def enter(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        # Arguments inside of a transform are wrappers, with which no call can be repeated.
        if in_transform():
            return
        call = ModuleCall(name, module, copied(args), copied(kwargs), setting)
        (stack[-1].children if stack else roots).append(call)
        stack.append(call)

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        if not in_transform():
            stack.pop().output = copied(output)

    handles: list[Any] = []
    for name, each in module.named_modules():
        if isinstance(each, torch.jit.ScriptModule):
            # Scripted modules do not support these hooks; the enclosing module is recorded.
            continue
        # Record before the module's own hooks, which run again when it is called alone.
        hook: Callable[..., None] = partial(enter, name)
        handles.append(each.register_forward_pre_hook(hook, prepend=True, with_kwargs=True))
        handles.append(each.register_forward_hook(leave))
    try:
        # Record gradients as in training: gradients inside need it, and layers may take other paths without it.
        with torch.enable_grad(), precision or nullcontext():
            module(*copied(args))
    except Exception as error:
        raise CallFailed(stack[-1] if stack else ModuleCall("", module, args, {}), error) from error
    finally:
        for handle in handles:
            handle.remove()
    return roots[0]


def is_repeatable(call: ModuleCall) -> bool:
    """Whether repeating the call gives the same output, in its own setting."""
    one, two = (call.again()() for _ in range(2))
    return same(one, two)


def unsteady_call(
    module: nn.Module, args: tuple[Any, ...], precision: InDouble | None = None
) -> tuple[ModuleCall, ModuleCall | None, str]:
    """Return the root call, and the innermost call whose outputs for equal inputs differ, with the reason."""
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    # One fork for both calls: equal seeds would hide random numbers, and the caller's generators must not change.
    with torch.random.fork_rng():
        first = record_calls(module, args, precision)
        changed = [name for name, buffer in module.named_buffers() if not same(buffer, before[name])]
        second = record_calls(module, args, precision)
    if changed:
        owner, _, buffer = changed[0].rpartition(".")
        called = next((call for call in first.post_order() if call.name == owner), first)
        return first, called, f"each call changes its buffer {buffer} in place"
    for one, two in zip(first.post_order(), second.post_order(), strict=False):
        if same((one.args, one.kwargs), (two.args, two.kwargs)) and not same(one.output, two.output):
            return first, one, "two calls with the same inputs give different outputs"
    return first, None, ""


def stale_call(
    called: nn.Module, fresh: nn.Module, args: tuple[Any, ...], precision: InDouble | None = None
) -> ModuleCall | None:
    """Return the innermost call whose module caches results of its parameters or inputs and ignores changes."""
    args = tree_map_only(Tensor, _moved, args)
    records: list[ModuleCall] = []
    for module in (called, fresh):
        numbers = [each for each in module.parameters() if each.is_floating_point() or each.is_complex()]
        before = [each.detach().clone() for each in numbers]
        with torch.random.fork_rng(), attributes_put_back(list(module.modules())), untouched_buffers(module.modules()):
            torch.manual_seed(0)
            try:
                with torch.no_grad():
                    for each in numbers:
                        each.copy_(_moved(each) + _MOVE)  # zeros move, too
                records.append(record_calls(module, args, precision))
            finally:
                with torch.no_grad():
                    for each, value in zip(numbers, before, strict=True):
                        each.copy_(value)
    for one, two in zip(*(each.post_order() for each in records), strict=False):
        if same((one.args, one.kwargs), (two.args, two.kwargs)) and not same(one.output, two.output, _STALE):
            return one
    return None


def _moved(tensor: Tensor) -> Tensor:
    return tensor * (1 - _MOVE) if tensor.is_floating_point() or tensor.is_complex() else tensor


def same(one: Any, two: Any, tolerance: float = 0.0) -> bool:
    """Whether two outputs hold equal numbers, to a relative tolerance."""
    pairs = zip(tree_leaves(one), tree_leaves(two), strict=False)
    return all(
        a.shape == b.shape and (equal_with_nan(a, b) or (tolerance > 0 and _close(a, b, tolerance)))
        for a, b in pairs
        if isinstance(a, Tensor) and isinstance(b, Tensor) and has_strides(a) and has_strides(b) and not a.is_nested
    )


def _close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    real = a.dtype == b.dtype and (a.is_floating_point() or a.is_complex())
    return real and torch.allclose(a, b, rtol=tolerance, equal_nan=True)
