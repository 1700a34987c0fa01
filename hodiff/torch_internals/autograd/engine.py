"""Recording by reverse mode, and its engine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable

# As torch.set_grad_enabled, without creating an object.
set_recording: Callable[[bool], None] = torch._C._set_grad_enabled
# As torch.autograd.grad, without its checks, which take a third of the time of a small product.
run_backward: Callable[..., tuple[Tensor | None, ...]] = Variable._execution_engine.run_backward
in_jit_trace: Callable[[], bool] = torch._C._is_tracing


def saved_tensor_hooks() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None:
    """Return the innermost pair of hooks set by `torch.autograd.graph.saved_tensors_hooks`, if any."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks


def in_fx_trace() -> bool:
    """Whether `make_fx` traces the running code; the check does not import `make_fx`."""
    module = sys.modules.get("torch.fx.experimental.proxy_tensor")
    return module is not None and module.get_proxy_mode() is not None
