"""Corrections in the calls of modules whose parameters somebody waits for.

Nobody has written `with hodiff.corrected():` around the forward pass of an ordinary loop, and the second derivative of
what it calls may be one that torch has wrong or not at all: of attention, for one. Hooks of all modules do it while
they are on.
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
    """Hooks that are on or off.

    Args:
        mode_for: The mode in which to call a module with these parameters; None for a call as it is.
    """

    def __init__(self, mode_for: Callable[[Sequence[Tensor]], Corrections | None]):
        self._mode_for = mode_for
        self._hooks: list[Any] = []
        self._here = threading.local()

    def switch(self, on: bool) -> None:
        """Switch the hooks on or off; calls that are being made end as they began."""
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
        """The modules that are being called in this thread, from the first whose parameters are waited for."""
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
