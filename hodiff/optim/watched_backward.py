"""Interception of backward passes: observers see a loss before its graph is freed.

PyTorch has no hook for the root of a backward pass. While an observer waits, a wrapper that shows the loss replaces
`torch.autograd.backward`, which `Tensor.backward` calls. When no observer waits any more, torch's function is
restored.

An ordinary training loop has no `with hodiff.corrected():` around its forward pass, where PyTorch's second derivatives
may be wrong or missing, as for attention. Hooks of all modules apply the corrections while an observer waits.
"""

from __future__ import annotations

import functools
import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, cast
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils import _pytree as pytree

from hodiff.corrections import Corrections, corrected
from hodiff.graphs import inspect_graph
from hodiff.recompute.reachable import named_modules, named_tensors
from hodiff.torch_internals.compilers.dynamo import (
    compiled_call,
    expect_hooks_of_all_modules,
    run_uncompiled_where,
    watch_compiled_code,
)
from hodiff.torch_internals.interception import active_function_modes, function_mode_count


class CorrectedCalls:
    """Hooks of all modules that can be switched on and off.

    Args:
        mode_for: Returns the mode in which to call a module with these parameters; None for a plain call.
    """

    def __init__(self, mode_for: Callable[[Sequence[Tensor]], Corrections | None]):
        self._mode_for = mode_for
        self._hooks: list[Any] = []
        self._here = threading.local()

    def switch(self, on: bool) -> None:
        """Switch the hooks on or off; they are not removed during a call."""
        if on and not self._hooks:
            expect_hooks_of_all_modules()
            self._hooks = [
                register_module_forward_pre_hook(self._enter),
                register_module_forward_hook(self._leave, always_call=True),
            ]
        elif not on and not self._calls:
            while self._hooks:
                self._hooks.pop().remove()

    @property
    def _calls(self) -> list[nn.Module]:
        """Modules that are being called in this thread, beginning with the first whose parameters are waited for."""
        calls: list[nn.Module] = self._here.__dict__.setdefault("calls", [])
        return calls

    def _enter(self, module: nn.Module, _: Any) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        calls = self._calls
        if calls:
            calls.append(module)
        elif not _is_corrected() and (mode := self._mode_for(list(module.parameters()))) is not None:
            self._here.mode = mode
            mode.__enter__()
            calls.append(module)

    def _leave(self, module: nn.Module, *_: Any) -> None:
        calls = [] if torch.compiler.is_compiling() else self._calls
        if calls and calls[-1] is module:
            calls.pop()
            if not calls:
                self._here.mode.__exit__(None, None, None)


def _is_corrected() -> bool:
    """Whether a closure or a transform of hodiff already corrects this thread's calls; twice would only cost time."""
    return bool(function_mode_count()) and any(type(each) is Corrections for each in active_function_modes())


class Observer:
    """Object that waits for the backward pass of a loss."""

    # Whether the observer computes second derivatives.
    second_order = True

    @abstractmethod
    def awaits(self, leaves: Sequence[Tensor]) -> bool:
        """Return whether the observer waits for a loss that depends on these leaves."""

    @abstractmethod
    def may_take(self, leaves: Sequence[Tensor]) -> bool:
        """Return whether a loss that depends on these leaves may be passed to the observer at any time."""

    @abstractmethod
    def see(self, loss: Tensor, leaves: Sequence[Tensor]) -> None:
        """Process a loss, whose graph stays, before its backward pass adds to the gradients of these leaves."""

    @abstractmethod
    def passed(self) -> None:
        """Note that the backward pass of the loss has ended."""


_waiting: WeakSet[Observer] = WeakSet()
# Observers to which a loss may be passed explicitly, and which compute its second derivatives.
_taking: WeakSet[Observer] = WeakSet()
_torchs_own: Callable[..., None] | None = None


def _mode_for(parameters: Sequence[Tensor]) -> Corrections | None:
    """Return the mode for the call of a module whose second derivatives an observer may compute."""
    if not _waiting and not _taking:
        # The observers were garbage-collected.
        _switch_corrections()
        return None
    if any(each.second_order and each.awaits(parameters) for each in _waiting):
        return Corrections(lean=True)
    # Few of these losses are differentiated twice, so compiled code stays compiled.
    return corrected() if any(each.may_take(parameters) for each in _taking) else None


_corrected_calls = CorrectedCalls(_mode_for)


def _switch_corrections() -> None:
    _corrected_calls.switch(bool(_taking) or any(each.second_order for each in _waiting))


def _takes_part() -> bool:
    """Whether the running call of compiled code contributes to the graph of a loss that an observer waits for."""
    if not _waiting or not torch.is_grad_enabled():
        return False
    call = compiled_call()
    if call is None:
        return True
    function, *given = call
    leaves = [each for _, each in named_tensors(function)]
    for value in (function, *pytree.tree_leaves(given)):
        if isinstance(value, Tensor) and value.requires_grad:
            leaves += inspect_graph(value)[0]
        else:
            leaves += [each for module in named_modules(value) for each in module.parameters(recurse=False)]
    return any(each.awaits(leaves) for each in _waiting)


run_uncompiled_where(_takes_part)


def wait(observer: Observer, waits: bool) -> None:
    """Start or stop waiting for a loss."""
    if waits:
        watch_compiled_code()
        _waiting.add(observer)
        _stand_in()
        _switch_corrections()
    else:
        _waiting.discard(observer)
        _switch_corrections()
        if not _waiting:
            _step_aside()


def take_by_hand(observer: Observer, takes: bool) -> None:
    """Start or stop correcting calls of modules for losses that are passed to the observer explicitly."""
    if takes and observer.second_order:
        _taking.add(observer)
    else:
        _taking.discard(observer)
    _switch_corrections()


def _stand_in() -> None:
    global _torchs_own
    if _torchs_own is not None:
        return
    own = _torchs_own = torch.autograd.backward

    @functools.wraps(own)
    def backward(
        tensors: Any,
        grad_tensors: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        grad_variables: Any = None,
        inputs: Any = None,
    ) -> None:
        # A given gradient comes from a loss outside the graph; the observers notice that they missed the pass.
        shown = _show(tensors, inputs) if grad_tensors is None and grad_variables is None else []
        try:
            own(tensors, grad_tensors, retain_graph, create_graph, grad_variables, inputs)
        finally:
            for observer in shown:
                observer.passed()

    torch.autograd.backward = backward


def _step_aside() -> None:
    global _torchs_own
    _switch_corrections()
    # If another wrapper has replaced this one, it may still call this one, which then does nothing.
    if _torchs_own is not None and getattr(torch.autograd.backward, "__wrapped__", None) is _torchs_own:
        torch.autograd.backward = cast(Any, _torchs_own)
        _torchs_own = None


def _show(tensors: Any, inputs: Any) -> list[Observer]:
    """Show a loss to the observers that wait for it."""
    if not _waiting:
        # The observers were garbage-collected.
        _step_aside()
        return []
    losses = (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)
    if not all(isinstance(each, Tensor) and each.numel() == 1 and each.requires_grad for each in losses):
        return []
    loss = losses[0].reshape(()) if losses[0].dim() else losses[0]
    for each in losses[1:]:
        loss = loss + each.reshape(())
    leaves = inspect_graph(loss).leaves
    if inputs is not None:
        given = inputs if isinstance(inputs, (list, tuple)) else [inputs]
        asked = {id(getattr(each.node, "variable", None) if isinstance(each, GradientEdge) else each) for each in given}
        leaves = [leaf for leaf in leaves if id(leaf) in asked]
    shown = [each for each in _waiting if each.awaits(leaves)]
    for observer in shown:
        observer.see(loss, leaves)
    return shown
