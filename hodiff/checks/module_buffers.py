"""Restoration of modules' buffers, such as running statistics, after a check."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from hodiff.common.module_state import exchanged_buffers
from hodiff.torch_internals.modules import buffers_by_name


@contextmanager
def buffers_put_back(*known: nn.Module) -> Iterator[None]:
    """Let known modules, and all other modules that are called meanwhile, change copies of their buffers.

    A module that is not known must be called outside of transforms first. Buffers are restored by value, while
    `hodiff.common.module_state` exchanges tensors, because a function may also hold a buffer directly.
    """
    seen: set[nn.Module] = set()
    with ExitStack() as stack:

        def exchange(module: nn.Module, args: Any = ()) -> None:
            del args
            if module not in seen:
                seen.add(module)
                buffers = buffers_by_name(module)
                copies = {name: each.detach().clone() for name, each in buffers.items() if isinstance(each, Tensor)}
                stack.enter_context(exchanged_buffers([(buffers, name, copy) for name, copy in copies.items()]))

        for module in known:
            module.apply(exchange)
        handle = register_module_forward_pre_hook(exchange)
        stack.callback(handle.remove)
        yield
