"""Buffers of modules, such as running statistics, that a check must leave as they were."""

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
    """Let some modules, and every other one that is called, however it is reached, change copies of their buffers.

    The first call of each module that is not known has to be outside of transforms. Values are written back,
    where `hodiff.common.module_state` exchanges tensors, as a function may hold a buffer by any other way.
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
