"""Corrections during calls of modules whose parameters an observer waits for.

An ordinary training loop has no `with hodiff.corrected():` around its forward pass. PyTorch's second derivatives may
be wrong or missing there, as for attention. Hooks of all modules apply the corrections while they are on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from hodiff.corrections import Corrections
from hodiff.torch_internals.compilers.dynamo import expect_hooks_of_all_modules


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
        if self._calls:
            self._calls.append(module)
        elif (mode := self._mode_for(list(module.parameters()))) is not None:
            self._here.mode = mode
            mode.__enter__()
            self._calls.append(module)

    def _leave(self, module: nn.Module, *_: Any) -> None:
        if not torch.compiler.is_compiling() and self._calls and self._calls[-1] is module:
            self._calls.pop()
            if not self._calls:
                self._here.mode.__exit__(None, None, None)
